"""Gathers and exchanges between real processes, in every dtype and with any number of rows."""

from typing import Any

import pytest
import torch
from tests.distributed.transport import Ranks

from interlace.comm.collectives import Collective, Exchange, Finish, Gather, perform
from interlace.comm.errors import BufferInFlightError
from interlace.comm.path import Op, Ticket

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def numbers(rank: int, rows: int, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    """Rows of three that say whose they are; exact in every dtype used."""
    flat = torch.arange(rows * 3) % 16 + 16 * rank
    return flat.view(rows, 3).to(dtype).to(ranks.device)


def gather(payload: torch.Tensor, stage: str = "x") -> Gather:
    return Gather(role="ep", stage=stage, payload=payload)


async def finish(communicator: Any, handle: Any) -> Any:
    return await perform(Finish(communicator=communicator, handle=handle, where="a test"))


async def ask(communicator: Any, request: Collective, ticket: Ticket | None = None) -> Any:
    return await finish(communicator, communicator.post(request, ticket))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_gather_gives_everybodys_rows_in_group_order(
    ranks: Ranks, dtype: torch.dtype, rows: int
) -> None:
    communicator = ranks.communicator("p", "ep", [range(ranks.size)])
    answer = ranks.run(ask(communicator, gather(numbers(ranks.rank, rows, dtype, ranks))))
    assert len(answer) == ranks.size
    for peer, part in enumerate(answer):
        torch.testing.assert_close(part, numbers(peer, rows, dtype, ranks), rtol=0, atol=0)


def rows_between(sender: int, receiver: int, case: str) -> int:
    if case == "nobody" or (case == "only rank 0 sends" and sender != 0):
        return 0
    if case == "only rank 0 receives" and receiver != 0:
        return 0
    return (sender + 2 * receiver) % 4 + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["all", "nobody", "only rank 0 sends", "only rank 0 receives"])
def test_an_exchange_moves_rows_also_when_some_or_all_ranks_have_none(
    ranks: Ranks, dtype: torch.dtype, case: str
) -> None:
    communicator = ranks.communicator("p", "ep", [range(ranks.size)])
    counts = [
        [rows_between(sender, receiver, case) for receiver in range(ranks.size)]
        for sender in range(ranks.size)
    ]
    recv = tuple(counts[sender][ranks.rank] for sender in range(ranks.size))
    payload = numbers(ranks.rank, sum(counts[ranks.rank]), dtype, ranks)
    request = Exchange(
        role="ep", stage="x", payload=payload, send=tuple(counts[ranks.rank]), recv=recv
    )
    answer = ranks.run(ask(communicator, request))
    expected = torch.cat(
        [
            numbers(sender, sum(counts[sender]), dtype, ranks).split(counts[sender])[ranks.rank]
            for sender in range(ranks.size)
        ]
    )
    assert answer.shape == (sum(recv), 3)
    assert answer.dtype == dtype
    torch.testing.assert_close(answer, expected, rtol=0, atol=0)


def test_a_payload_that_is_not_contiguous_travels_whole(ranks: Ranks) -> None:
    communicator = ranks.communicator("p", "ep", [range(ranks.size)])
    payload = numbers(ranks.rank, 6, torch.float32, ranks)[::2, 1:]
    answer = ranks.run(ask(communicator, gather(payload)))
    assert answer[ranks.rank].tolist() == payload.tolist()


def test_two_communicators_cross_each_other(ranks: Ranks) -> None:
    first = ranks.communicator("prefill", "ep", [range(ranks.size)])
    second = ranks.communicator("decode", "ep", [range(ranks.size)])

    async def crossing() -> tuple[Any, Any]:
        mine = numbers(ranks.rank, 2, torch.int64, ranks)
        one = first.post(gather(mine), None)
        two = second.post(gather(mine + 100), None)
        answers = await finish(second, two), await finish(first, one)
        return [part.tolist() for part in answers[0]], [part.tolist() for part in answers[1]]

    later, earlier = ranks.run(crossing())
    everybody = [numbers(peer, 2, torch.int64, ranks) for peer in range(ranks.size)]
    assert earlier == [part.tolist() for part in everybody]
    assert later == [(part + 100).tolist() for part in everybody]


def test_a_result_holds_until_its_slot_comes_round_again(ranks: Ranks) -> None:
    communicator = ranks.communicator("p", "ep", [range(ranks.size)], slots=2)

    def ticket(nth: int) -> Ticket:
        op = Op(kind="Gather", role="ep", stage="x")
        return Ticket(
            epoch=0,
            step=0,
            seq=nth,
            path="p",
            path_seq=nth,
            comm_seq=nth,
            slot=nth % 2,
            op=op,
            version=0,
            rows=0,
        )

    mine = numbers(ranks.rank, 1, torch.int64, ranks)
    results = [
        ranks.run(ask(communicator, gather(mine + 10 * nth), ticket(nth))) for nth in range(3)
    ]
    assert results[1][0].tolist() == (numbers(0, 1, torch.int64, ranks) + 10).tolist()
    assert results[0][0].data_ptr() == results[2][0].data_ptr()
    assert results[0][0].data_ptr() != results[1][0].data_ptr()


def test_a_slot_in_flight_is_not_posted_again(ranks: Ranks) -> None:
    communicator = ranks.communicator("p", "ep", [range(ranks.size)], slots=1)
    payload = numbers(ranks.rank, 1, torch.int64, ranks)
    handle = communicator.post(gather(payload), None)
    with pytest.raises(BufferInFlightError):
        communicator.post(gather(payload), None)
    ranks.run(finish(communicator, handle))


def test_control_carries_everybodys_bytes(ranks: Ranks) -> None:
    control = ranks.control()
    for nth in range(3):
        payload = bytes([ranks.rank, nth, 255, 0])
        request = Gather(role="control", stage="proposal", payload=payload)
        answer = ranks.run(ask(control, request))
        assert answer == [bytes([peer, nth, 255, 0]) for peer in range(ranks.size)]
