"""LocalWorld names what went wrong: a mis-slotted message, overwrites, who waits in a deadlock."""

from dataclasses import replace
from typing import Any

import pytest
from tests.comm.toy import local_world

from interlace.comm.collectives import Exchange, Finish, Gather, Park, perform
from interlace.comm.errors import DeadlockError, DivergedError
from interlace.comm.path import Op, Ticket
from interlace.comm.testing import LocalWorld

TICKET = Ticket(
    epoch=0,
    step=0,
    seq=0,
    path="decode",
    path_seq=0,
    comm_seq=0,
    slot=0,
    op=Op(kind="Gather", role="ep", stage="0.counts"),
    version=0,
    rows=0,
)
KEY = "decode", "ep"


async def gather(world: LocalWorld, rank: int, ticket: Ticket | None, payload: Any) -> Any:
    communicator = world.communicator(KEY, range(world.size), rank)
    handle = communicator.post(Gather(role="ep", stage="0.counts", payload=payload), ticket)
    return await perform(Finish(communicator=communicator, handle=handle, where=f"rank {rank}"))


def test_a_message_in_the_wrong_slot_is_named() -> None:
    later = replace(TICKET, comm_seq=1, slot=0, op=replace(TICKET.op, stage="0.dispatch"))
    world = local_world(2)
    with pytest.raises(DivergedError) as caught:
        world.run([gather(world, 0, TICKET, [1]), gather(world, 1, later, [2])])
    assert str(caught.value) == (
        "('decode', 'ep'): rank 0 waits for count 0 (epoch 0 decode/ep 0.counts) of rank 1; "
        "slot 0 holds count 1 (epoch 0 decode/ep 0.dispatch)"
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(TICKET, path="prefill"),
        replace(TICKET, epoch=1),
        replace(TICKET, op=replace(TICKET.op, role="tp")),
        replace(TICKET, op=replace(TICKET.op, stage="1.counts")),
    ],
    ids=["path", "epoch", "role", "stage"],
)
def test_everything_in_the_header_is_checked(other: Ticket) -> None:
    world = local_world(2)
    with pytest.raises(DivergedError, match="slot 0 holds count 0"):
        world.run([gather(world, 0, TICKET, [1]), gather(world, 1, other, [2])])


def test_a_message_in_a_slot_nobody_reads_is_a_deadlock() -> None:
    world = local_world(2)
    astray = replace(TICKET, slot=1)
    with pytest.raises(DeadlockError, match=r"nothing can move. Waiting: rank 0; rank 1$"):
        world.run([gather(world, 0, TICKET, [1]), gather(world, 1, astray, [2])])


def test_a_deadlock_names_every_wait_and_who_has_returned() -> None:
    async def leaves() -> None:
        pass

    world = local_world(3)
    with pytest.raises(DeadlockError, match=r"Waiting: rank 0; rank 2; returned: ranks \[1\]"):
        world.run([gather(world, 0, None, []), leaves(), gather(world, 2, None, [])])


def test_overwriting_an_unread_message_is_recorded() -> None:
    world = local_world(2, slots=1)
    communicator = world.communicator(KEY, (0, 1), 0)
    for _ in range(2):
        communicator.post(Gather(role="ep", stage="x", payload=[1]), None)
    assert world.violations == [
        "('decode', 'ep'): rank 0 overwrites slot 0 (count 0), not yet read by ranks [0, 1]"
    ]


def test_an_exchange_moves_rows_in_member_order_and_copies_them() -> None:
    sent = {0: [1, 2, 3], 1: [4]}

    async def exchange(rank: int) -> Any:
        communicator = world.communicator(KEY, (0, 1), rank)
        send, recv = (((1, 2), (1, 1)), ((1, 0), (2, 0)))[rank]
        request = Exchange(role="ep", stage="x", payload=sent[rank], send=send, recv=recv)
        handle = communicator.post(request, None)
        sent[rank].clear()
        return await perform(Finish(communicator=communicator, handle=handle, where="x"))

    world = local_world(2)
    assert world.run([exchange(0), exchange(1)]) == [[1, 4], [2, 3]]


def test_what_was_posted_does_not_change_with_the_senders_payload() -> None:
    async def member(rank: int) -> Any:
        payload = [rank]
        communicator = world.communicator(KEY, (0, 1), rank)
        handle = communicator.post(Gather(role="ep", stage="x", payload=payload), None)
        payload[0] = 99
        return await perform(Finish(communicator=communicator, handle=handle, where="x"))

    world = local_world(2)
    assert world.run([member(0), member(1)]) == [[[0], [1]], [[0], [1]]]


def test_groups_of_one_role_are_apart_on_a_serial_device() -> None:
    async def member(rank: int) -> Any:
        members = (0, 1) if rank < 2 else (2, 3)
        communicator = world.communicator(("decode", "tp"), members, rank)
        handle = communicator.post(Gather(role="tp", stage="x", payload=[rank]), TICKET)
        return await perform(Finish(communicator=communicator, handle=handle, where="x"))

    for seed in range(20):
        world = local_world(4, serial_slots=1, seed=seed)
        answers = world.run([member(rank) for rank in range(4)])
        assert answers == [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]]]


def test_a_failing_rank_ends_the_world_and_closes_the_others() -> None:
    closed = []

    async def waits(rank: int) -> None:
        try:
            await gather(world, rank, None, [])
        except GeneratorExit:
            closed.append(rank)
            raise

    async def fails() -> None:
        await perform(Park(ms=1))
        await perform(Park(ms=1))
        raise ZeroDivisionError

    for seed in range(10):
        world = local_world(3, seed=seed)
        with pytest.raises(ZeroDivisionError):
            world.run([waits(0), waits(1), fails()])


def test_all_ranks_parked_calls_on_park() -> None:
    arrived = []

    async def rank() -> int:
        while not arrived:
            await perform(Park(ms=5))
        return len(arrived)

    answers = local_world(2).run([rank(), rank()], on_park=lambda: arrived.append(1))
    assert answers[0] >= 1


def test_a_foreign_suspension_is_a_type_error_that_says_so() -> None:
    async def rank() -> None:
        await perform("a socket")

    with pytest.raises(TypeError, match="a rank suspended on 'a socket'; only Finish and Park"):
        local_world(1).run([rank()])
