"""Headers, deadlines and errors in words; the link model at work; byte strings."""

import zlib
from typing import Any

import pytest
from tests.comm.windows_in_memory import CAPACITY, NoWaiter, channel, memories

from interlace.comm.collectives import Exchange, Gather
from interlace.comm.errors import (
    CanaryError,
    CapacityError,
    CollectiveTimeoutError,
    DivergedError,
)
from interlace.comm.link import SEGMENT_BYTES, Link, LinkModel
from interlace.comm.path import Op, Ticket
from interlace.comm.window_channel import ByteCommunicator, WindowChannel
from interlace.comm.window_layout import MAGIC
from interlace.comm.window_reference import Window

MEMBERS = (4, 7)
Pair = list[ByteCommunicator]


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


def pair(shared: list[bytearray] | None = None, capacity: int = CAPACITY, **how: Any) -> Pair:
    """Ranks 4 and 7."""
    shared = memories(2, 2, capacity) if shared is None else shared
    made = []
    for me, rank in enumerate(MEMBERS):
        clock = how.get("clock", lambda: 0)
        window = Window(shared, me, 2, capacity, crc("decode"), crc("ep"), (), clock)
        made.append(ByteCommunicator(channel(window, rank, MEMBERS, capacity=capacity, **how)))
    return made


def ticket(nth: int, stage: str = "3.dispatch", **changes: Any) -> Ticket:
    facts: dict[str, Any] = {
        "epoch": 1,
        "step": 9,
        "seq": 50 + nth,
        "path": "decode",
        "path_seq": nth,
        "comm_seq": nth,
        "slot": nth % 2,
        "op": Op(kind="Gather", role="ep", stage=stage),
        "version": 0,
        "rows": 0,
    }
    return Ticket(**{**facts, **changes})


def gather(payload: bytes, stage: str = "3.dispatch") -> Gather:
    return Gather(role="ep", stage=stage, payload=payload)


def test_byte_strings_are_gathered_with_and_without_tickets() -> None:
    for tickets in ([None] * 5, [ticket(nth) for nth in range(5)]):
        group = pair()
        for nth, one in enumerate(tickets):
            handles = [c.post(gather(bytes([me, nth])), one) for me, c in enumerate(group)]
            for communicator, handle in zip(group, handles, strict=True):
                assert communicator.poll(handle)
                assert communicator.result(handle) == [bytes([0, nth]), bytes([1, nth])]


def test_rows_of_bytes_are_exchanged() -> None:
    group = [ByteCommunicator(one._channel, row_bytes=2) for one in pair()]
    sends, recvs = [(1, 2), (0, 0)], [(1, 0), (2, 0)]
    handles = [
        c.post(Exchange(role="ep", stage="x", payload=payload, send=send, recv=recv), None)
        for c, payload, send, recv in zip(group, [b"aabbcc", b""], sends, recvs, strict=True)
    ]
    assert [c.result(h) for c, h in zip(group, handles, strict=True)] == [b"aa", b"bbcc"]


WANTED = "rank 4: decode/ep of ranks [4, 7]: epoch 1 seq 50 message 0 Gather 3.dispatch"


@pytest.mark.parametrize(
    ("field", "other", "words"),
    [
        ("epoch", {"epoch": 2}, "epoch 2 seq 50 message 0 Gather 3.dispatch"),
        ("seq", {"seq": 51}, "epoch 1 seq 51 message 0 Gather 3.dispatch"),
        ("stage", {"stage": "9.x"}, f"seq 50 message 0 Gather stage with crc {crc('9.x'):08x}"),
    ],
)
def test_another_collective_is_named_with_what_was_wanted_and_whose_it_is(
    field: str, other: dict[str, Any], words: str
) -> None:
    one, two = pair()
    handle = one.post(gather(b"x"), ticket(0))
    theirs = ticket(0, **other)
    two.post(gather(b"x", theirs.op.stage), theirs)
    with pytest.raises(DivergedError) as error:
        one.result(handle)
    told = str(error.value)
    assert told.startswith(f"{WANTED}: rank 7's slot 0 holds another collective: ")
    assert words in told
    assert told.endswith(f"(differs in {field})")


def test_another_path_in_the_slot_is_named_as_that() -> None:
    shared = memories(2)
    one = pair(shared)[0]
    window = Window(shared, 1, 2, CAPACITY, crc("prefill"), crc("ep"))
    other = ByteCommunicator(channel(window, 7, MEMBERS, path="prefill"))
    handle = one.post(gather(b"x"), ticket(0))
    other.post(gather(b"x"), ticket(0))
    with pytest.raises(DivergedError, match=r"of a path with crc .* \(differs in path\)"):
        one.result(handle)


def test_another_number_of_bytes_is_named() -> None:
    one, two = pair()
    handle = one.post(gather(b"x"), ticket(0))
    two.post(gather(b"xyz"), ticket(0))
    with pytest.raises(
        DivergedError, match=r"1 bytes are owed by rank 7, whose message \(2 members\) has 3"
    ):
        one.result(handle)


def test_a_broken_canary_is_an_error_of_its_own() -> None:
    shared = memories(2)
    one, two = pair(shared)
    handle = one.post(gather(b"x"), ticket(0))
    two.post(gather(b"y"), ticket(0))
    shared[1][MAGIC] ^= 1
    with pytest.raises(CanaryError, match="rank 7's slot 0 was written by somebody else"):
        one.result(handle)


def test_a_slot_that_is_ahead_was_written_over_before_it_was_read() -> None:
    one, two = pair()
    handle = one.post(gather(b"x"), ticket(0))
    two.post(gather(b"y"), ticket(2))
    assert one.poll(handle)
    with pytest.raises(DivergedError, match="before it was read: it holds message 2"):
        one.result(handle)


def test_a_message_that_does_not_fit_says_what_to_raise_and_is_not_sent() -> None:
    one, two = pair(enlarge="launch.window_mib")
    with pytest.raises(CapacityError, match=r"5,000 bytes .* of 4,096: raise launch.window_mib"):
        one.post(gather(bytes(5000)), None)
    handle = two.post(gather(b"x"), None)
    assert not two.poll(handle)


def test_a_result_that_is_taken_too_early_is_awaited_up_to_the_deadline() -> None:
    seconds = iter(range(10**6))
    one, _ = pair(clock=lambda: next(seconds) * 10**9)
    handle = one.post(gather(b"x"), ticket(0))
    with pytest.raises(CollectiveTimeoutError, match=f"within 5 s: {WANTED[:20]}"):
        one.result(handle)


# ---- over a link


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


LATENCY = 10_000
"""On a link with a byte a nanosecond."""


def linked(clock: Clock, capacity: int, shared_link: bool) -> tuple[list[Pair], list[NoWaiter]]:
    """Prefill's and decode's communicators of both ranks, over one link a rank or over two."""
    model, waiters = LinkModel(latency_us=10, gbit=8), [NoWaiter(), NoWaiter()]
    links = [[Link(model), Link(model)] for _ in MEMBERS]
    paths: list[Pair] = []
    for nth in (0, 1):
        memory = memories(2, 2, capacity)
        ends = []
        for me, rank in enumerate(MEMBERS):
            window = Window(memory, me, 2, capacity, crc("decode"), crc("ep"), (), clock)
            made: WindowChannel = channel(
                window,
                rank,
                MEMBERS,
                capacity=capacity,
                clock=clock,
                waiter=waiters[me],
                link=links[me][0 if shared_link else nth],
            )
            ends.append(ByteCommunicator(made))
        paths.append(ends)
    return paths, waiters


def test_a_message_over_a_link_is_there_after_latency_and_transmission_and_who_waits_is_told() -> (
    None
):
    clock = Clock()
    ((one, two), _), waiters = linked(clock, CAPACITY, shared_link=True)
    mine, theirs = one.post(gather(bytes(2000)), None), two.post(gather(bytes(2000)), None)
    there = LATENCY + 2000
    for clock.now in (0, there - 1):
        assert not one.poll(mine)
        assert not two.poll(theirs)
    assert waiters[0].due_at == waiters[1].due_at == [there, there]
    clock.now = there
    assert one.poll(mine)
    assert two.poll(theirs)
    assert len(one.result(mine)) == 2


@pytest.mark.parametrize("shared_link", [True, False])
def test_a_small_message_passes_a_large_one_and_delays_it_on_a_shared_link_only(
    shared_link: bool,
) -> None:
    clock, big, small = Clock(), 4 * SEGMENT_BYTES, 1000
    (prefill, decode), _ = linked(clock, big, shared_link)
    large = [c.post(gather(bytes(big)), None) for c in prefill]
    clock.now = 100
    little = [c.post(gather(bytes(small)), None) for c in decode]
    there = (SEGMENT_BYTES if shared_link else clock.now) + small + LATENCY
    for clock.now, found in ((there - 1, False), (there, True)):
        assert [c.poll(h) for c, h in zip(decode, little, strict=True)] == [found, found]
    there = big + LATENCY + (small if shared_link else 0)
    for clock.now, found in ((there - 1, False), (there, True)):
        assert [c.poll(h) for c, h in zip(prefill, large, strict=True)] == [found, found]


def test_what_a_rank_sends_itself_takes_no_time() -> None:
    clock = Clock()
    window = Window(memories(1), 0, 2, CAPACITY, crc("decode"), crc("ep"), (), clock)
    alone = channel(window, 4, (4,), clock=clock, link=Link(LinkModel(latency_us=10, gbit=8)))
    communicator = ByteCommunicator(alone)
    handle = communicator.post(gather(b"x"), None)
    assert communicator.poll(handle)
    assert communicator.result(handle) == [b"x"]
