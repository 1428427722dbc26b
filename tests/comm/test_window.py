"""The window's functions, in C++ and in Python, over the same bytes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.windows_in_memory import (
    CAPACITY,
    EXTENSION,
    PATH,
    ROLE,
    end,
    ends,
    kinds,
    memories,
)

from interlace.comm import window_layout as at
from interlace.comm.window_reference import Window

needs_extension = pytest.mark.skipif(EXTENSION is None, reason="built without a compiler")
TWO = pytest.mark.parametrize("which", kinds(2), ids=" and ".join)
EACH = pytest.mark.parametrize("kind", sorted({kind for which in kinds(2) for kind in which}))

Call = tuple[int, ...]


def call(nth: int, **changes: int) -> Call:
    """slot, comm_seq, epoch, seq, stage, kind of message `nth`."""
    fields = {"comm_seq": nth, "epoch": 3, "seq": 100 + nth, "stage": 7, "kind": at.GATHER}
    return (nth % 2, *{**fields, **changes}.values())


@needs_extension
def test_the_layout_in_cpp_is_that_of_window_layout() -> None:
    for name, value in EXTENSION.layout().items():
        assert getattr(at, name) == value, name
    for members in (1, 2, 3, 8, 100):
        for capacity in (0, 1, 4000, 4096, 1 << 20):
            sizes = at.header_bytes(members), at.slot_bytes(members, capacity)
            assert EXTENSION.sizes(members, capacity) == sizes


@needs_extension
def test_both_leave_the_same_bytes() -> None:
    found = []
    for kind in ("c++", "python"):
        shared = memories(3)
        one = end(kind, shared, 1)
        one.post(*call(0), b"hello", (5, 5, 5), 99)
        one.post(*call(1, kind=at.EXCHANGE), b"abcdef", (1, 2, 3))
        one.postpone(0, 0, 12345)
        found.append(bytes(shared[1]))
    assert found[0] == found[1]


@TWO
def test_a_gather_gives_everybody_both_payloads(which: tuple[str, ...]) -> None:
    group = ends(which, memories(2))
    for nth in range(5):
        for me, window in enumerate(group):
            assert window.poll(nth % 2, nth) == -1
            window.post(*call(nth), bytes([me, nth]), (2, 2))
        for window in group:
            out = bytearray(4)
            assert window.poll(nth % 2, nth) == 0
            assert window.take(*call(nth), (2, 2), out) is None
            assert out == bytes([0, nth, 1, nth])


def test_there_is_nothing_to_ask_the_twin_without_python() -> None:
    assert end("python", memories(1), 0).watch(0, 0) is None


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[str, ...], list[list[list[bytes]]]]:
    """Who runs what, and per round what each member sends to each."""
    members = draw(st.integers(1, 5))
    which = draw(st.sampled_from(kinds(members)))
    part = st.binary(max_size=40) | st.just(b"") | st.binary(min_size=700, max_size=700)
    one = st.lists(st.lists(part, min_size=members, max_size=members), min_size=members)
    rounds = st.lists(one.map(lambda rows: rows[:members]), min_size=1, max_size=4)
    return which, draw(rounds)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(exchanges())
def test_an_exchange_brings_every_part_to_its_member(
    case: tuple[tuple[str, ...], list[list[list[bytes]]]],
) -> None:
    which, rounds = case
    group = ends(which, memories(len(which)))
    for nth, parts in enumerate(rounds):
        this = call(nth, kind=at.EXCHANGE)
        for window, own in zip(group, parts, strict=True):
            window.post(*this, b"".join(own), tuple(map(len, own)))
        for me, window in enumerate(group):
            owed = [own[me] for own in parts]
            out = bytearray(sum(map(len, owed)))
            assert window.poll(nth % 2, nth) == 0
            assert window.take(*this, tuple(map(len, owed)), out) is None
            assert out == b"".join(owed)


# ---- what is refused, by either


def posted(which: tuple[str, ...]) -> tuple[list[bytearray], list[Any]]:
    """Message 0 of both, three bytes each."""
    shared = memories(2)
    group = ends(which, shared)
    for window in group:
        window.post(*call(0), b"abc", (3, 3))
    return shared, group


@TWO
@pytest.mark.parametrize("field", ["comm_seq", "epoch", "seq", "stage", "kind"])
def test_a_header_of_another_collective_is_found(which: tuple[str, ...], field: str) -> None:
    group = ends(which, memories(2))
    theirs = call(0, **{field: 2}) if field != "comm_seq" else call(0)
    group[0].post(*call(0), b"abc", (3, 3))
    group[1].post(*theirs, b"abcabc", (3, 3))
    if field == "comm_seq":  # the flag tells of the slot, the header of what is in it
        group[1].post(0, 2, *theirs[2:], b"abc", (3, 3))
        assert group[0].take(*call(0), (3, 3), bytearray(6))[:2] == (at.OVERWRITTEN, 1)
        return
    assert group[0].poll(0, 0) == 0
    code, member, raw = group[0].take(*call(0), (3, 3), bytearray(6))
    assert (code, member) == (at.MISMATCH, 1)
    assert getattr(at.Header.unpack(raw, 2), field) == 2


@EACH
@pytest.mark.parametrize(("path", "role"), [(PATH + 1, ROLE), (PATH, ROLE + 1)])
def test_a_message_of_another_path_or_role_is_found(kind: str, path: int, role: int) -> None:
    shared = memories(2)
    one, other = end(kind, shared, 0), end(kind, shared, 1, path=path, role=role)
    one.post(*call(0), b"abc", (3, 3))
    other.post(*call(0), b"abc", (3, 3))
    assert one.take(*call(0), (3, 3), bytearray(6))[:2] == (at.MISMATCH, 1)


@TWO
@pytest.mark.parametrize("owed", [2, 4])
def test_another_number_of_bytes_than_is_owed_is_found(which: tuple[str, ...], owed: int) -> None:
    _, group = posted(which)
    fault = group[1].take(*call(0), (owed, 3), bytearray(20))
    assert fault[:2] == (at.MISMATCH, 0)


@TWO
@pytest.mark.parametrize("where", ["in front", "behind"])
def test_a_canary_tells_of_bytes_written_by_somebody_else(
    which: tuple[str, ...], where: str
) -> None:
    shared, group = posted(which)
    place = at.MAGIC if where == "in front" else at.header_bytes(2) + 3
    shared[1][place] ^= 1
    assert group[0].take(*call(0), (3, 3), bytearray(6))[:2] == (at.CANARY, 1)


@TWO
def test_a_size_that_cannot_be_is_a_broken_canary(which: tuple[str, ...]) -> None:
    shared, group = posted(which)
    shared[1][at.NUM_BYTES + 7] = 1
    assert group[0].take(*call(0), (3, 3), bytearray(6))[:2] == (at.CANARY, 1)


@TWO
def test_a_slot_that_is_being_written_again_is_found(which: tuple[str, ...]) -> None:
    shared, group = posted(which)
    shared[1][at.BEGUN] = 3
    assert group[0].take(*call(0), (3, 3), bytearray(6))[:2] == (at.OVERWRITTEN, 1)


@TWO
def test_two_slots_are_enough_and_one_is_not(which: tuple[str, ...]) -> None:
    """Whoever is ahead has posted its next before the other has taken the last."""
    for slots, expected in ((2, None), (1, at.OVERWRITTEN)):
        group = ends(which, memories(2, slots), slots=slots)
        for window in group:
            window.post(*call(0), b"old", (3, 3))
        assert group[0].take(*call(0), (3, 3), bytearray(6)) is None
        group[0].post(1 % slots, *call(1)[1:], b"new", (3, 3))
        out = bytearray(6)
        fault = group[1].take(*call(0), (3, 3), out)
        assert (fault and fault[0]) == expected
        assert fault is not None or out == b"oldold"


@EACH
def test_what_does_not_fit_or_is_not_there_is_refused(kind: str) -> None:
    shared = memories(2)
    window = end(kind, shared, 0)
    with pytest.raises(ValueError, match=f"4097 bytes do not fit into a slot of {CAPACITY}"):
        window.post(*call(0), bytes(4097), (4097, 4097))
    with pytest.raises(ValueError, match="slot 2 of 2"):
        window.post(2, *call(0)[1:], b"", (0, 0))
    with pytest.raises(ValueError, match="a buffer of 2 bytes where 3 are needed"):
        window.post(*call(0), b"ab", (3, 3))
    with pytest.raises(ValueError, match="1 counts for 2 members"):
        window.post(*call(0), b"", (0,))
    assert window.poll(0, 0) == -1
    assert shared[0] == bytes(len(shared[0]))
    assert window.take(*call(0), (0, 0), b"" if kind == "python" else bytearray())[:2] == (
        at.NOT_THERE,
        0,
    )
    with pytest.raises(ValueError, match="need"):
        end(kind, [bytearray(100), bytearray(100)], 0)


@EACH
def test_a_closed_window_lets_go_of_its_memory_and_is_not_used_again(kind: str) -> None:
    shared = memories(2)
    window = end(kind, shared, 0)
    window.close()
    shared[0].clear()  # a buffer that is still held cannot change its size
    with pytest.raises(ValueError, match=r"closed|released"):
        window.poll(0, 0)


# ---- when a message is visible


@TWO
def test_a_message_is_awaited_until_it_is_visible_but_not_by_its_sender(
    which: tuple[str, ...],
) -> None:
    group = ends(which, memories(2))
    far = 1 << 62
    group[0].post(*call(0), b"abc", (3, 3), far)
    group[1].post(*call(0), b"abc", (3, 3), 1)
    assert group[0].poll(0, 0) == 0
    assert group[1].poll(0, 0) == far
    group[0].postpone(0, 0, far + 5)
    assert group[1].poll(0, 0) == far + 5
    group[0].postpone(0, 2, 0)  # another message than the one in the slot
    assert group[1].poll(0, 0) == far + 5


def test_with_a_clock_of_its_own_the_twin_sees_it_at_that_time() -> None:
    now = 0
    shared = memories(2)
    one, other = (Window(shared, me, 2, CAPACITY, PATH, ROLE, (), lambda: now) for me in (0, 1))
    one.post(*call(0), b"abc", (3, 3), 500)
    other.post(*call(0), b"abc", (3, 3))
    for now, found in ((0, 500), (499, 500), (500, 0), (10**9, 0)):
        assert other.poll(0, 0) == found, now
