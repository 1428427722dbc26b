"""What is wrong with a message is found in a pass in one call as where it is awaited alone."""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.windows_in_memory import EXTENSION
from tests.moe.crossing import ROLE, SLOTS, Walker, Ways, tickets_of
from tests.moe.driving import Ranks, describe

from interlace.comm import window_layout as at
from interlace.comm.collectives import finish
from interlace.comm.crossing import Crossing
from interlace.comm.driver import run_blocking
from interlace.comm.errors import (
    CanaryError,
    CapacityError,
    CollectiveTimeoutError,
    CommunicationError,
    DivergedError,
)
from interlace.comm.path import Op
from interlace.moe import kernels
from interlace.moe.config import read_config
from interlace.moe.description import Description

pytestmark = pytest.mark.skipif(
    EXTENSION is None or kernels.instructions() == "", reason="built without a compiler"
)
WAYS = ((True, True), (True, False), (False, False))


@pytest.fixture(scope="module")
def ranks(tiny_folders: dict[str, Path]) -> Ranks:
    return Ranks(tiny_folders["qwen3_moe"], read_config(tiny_folders["qwen3_moe"]), world=2)


def rows(num: int, salt: int = 0) -> Description:
    return describe(([(salt * 31 + i * 17) % 320 for i in range(num)], 0, (1, 2)))


def errors_of(
    walkers: list[Walker], meanwhile: Callable[[], None] = lambda: None
) -> list[CommunicationError | None]:
    """What each rank raises in the end; who raises nothing gets as far as it can. `meanwhile`
    happens when everybody has sent a first message and rank 0 has read none."""
    errors: list[CommunicationError | None] = [None] * len(walkers)

    def moved(nth: int, goes_on: Callable[[], object]) -> bool:
        try:
            return goes_on() is not False
        except CommunicationError as error:
            errors[nth], walkers[nth].waits_for = error, None
            return True

    with torch.inference_mode():
        for nth, walker in enumerate(walkers):
            moved(nth, walker.go_on)
        meanwhile()
        while any(moved(n, w.arrived) for n, w in enumerate(walkers) if w.waits_for is not None):
            pass
    return errors


def assert_one_error(
    errors: Sequence[CommunicationError | None], kind: type[CommunicationError], words: str
) -> None:
    """However a rank goes, it is this one."""
    assert {type(error) for error in errors} == {kind}
    assert len({str(error) for error in errors}) == 1, errors
    assert re.search(words, str(errors[0])), errors[0]


def own(nth: int, stage: str) -> str:
    return (
        rf"^rank 0: decode/ep of ranks \[0, 1\]: epoch 0 seq {nth} message {nth} Exchange {stage}"
    )


@pytest.mark.parametrize("nth", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("epoch", {"epoch": 5}),
        ("seq", {"seq": 77}),
        ("stage", {"op": Op(kind="Exchange", role=ROLE, stage="9.elsewhere")}),
    ],
)
def test_another_collective_is_named(
    ranks: Ranks, field: str, other: dict[str, Any], nth: int
) -> None:
    errors = []
    for crosses in WAYS:
        ways = Ways(ranks, crosses)
        walkers = ways.walkers(rows(3), rows(4, 1), changed_from=nth, **other)
        errors.append(errors_of(walkers)[0])
    words = f"rank 1's slot {nth % 2} holds another collective: .*differs in {field}"
    assert_one_error(errors, DivergedError, f"{own(nth, ways.stages[nth])}: {words}")


def change(memory: mmap.mmap, offset: int, add: int) -> None:
    """A number in the first slot of a rank."""
    (value,) = struct.unpack_from("<q", memory, offset)
    struct.pack_into("<q", memory, offset, value + add)


HEAD = at.header_bytes(2)
COUNTS_BYTES = 8 * 8
"""Of a message that says how many rows come for each of eight experts."""


@pytest.mark.parametrize(
    ("offset", "kind", "words"),
    [
        (at.MAGIC, CanaryError, "rank 1's slot 0 was written by somebody else"),
        (HEAD + COUNTS_BYTES, CanaryError, "rank 1's slot 0 was written by somebody else"),
        (at.BEGUN, DivergedError, "rank 1's slot 0 was written over before it was read"),
        (at.COUNTS, DivergedError, r"32 bytes are owed by rank 1, whose message .* has 33"),
    ],
)
def test_a_message_that_somebody_has_changed_is_refused(
    ranks: Ranks, offset: int, kind: type[CommunicationError], words: str
) -> None:
    errors = []
    for crosses in WAYS:
        ways = Ways(ranks, crosses)
        walkers = ways.walkers(rows(3), rows(4, 1))
        errors.append(errors_of(walkers, partial(change, ways.memories[1], offset, 1))[0])
    assert_one_error(errors, kind, f"{own(0, '0.counts')}: {words}")


@pytest.mark.parametrize("add", [1, -1, 1 << 40])
def test_other_rows_than_were_counted_are_refused(ranks: Ranks, add: int) -> None:
    for crosses in WAYS[:2]:
        ways = Ways(ranks, crosses)
        walkers = ways.walkers(rows(3), rows(40, 1))
        errors = errors_of(walkers, partial(change, ways.memories[1], HEAD, add))
        words = r": [-\d,]+ bytes are owed by rank 1, whose message \(2 members\) has [\d,]+$"
        assert_one_error(errors[:1], DivergedError, own(1, "0.dispatch") + words)


@pytest.mark.parametrize(
    ("num", "capacity", "stage"),
    [(3, COUNTS_BYTES - 1, "0.counts"), (9, 512, "0.dispatch"), (9, 9 * 2 * 256, "0.combine")],
)
def test_a_slot_too_small_says_what_to_raise_and_nothing_is_sent(
    ranks: Ranks, num: int, capacity: int, stage: str
) -> None:
    told = set()
    for crosses in WAYS:
        ways = Ways(ranks, crosses, capacity)
        errors = errors_of(ways.walkers(rows(num), rows(num)))
        told.add("; ".join(map(str, errors)))
        for memory, error in zip(ways.memories, errors, strict=True):
            nth = ways.stages.index(stage)
            slot = memory[nth % SLOTS * at.slot_bytes(2, capacity) :]
            assert isinstance(error, CapacityError | None)
            assert (at.Header.unpack(slot, 2).released == nth + 1) == (error is None)
    assert len(told) == 1, told
    words = rf" {stage}: a message of [\d,]+ bytes does not fit into a slot of {capacity:,}: raise "
    assert re.search(f"{words}launch.window_mib", *told)


def lose(crossing: Crossing, nth: int) -> object:
    """From now on rank 1's nth message is another one by the time it has been read; to be kept."""
    intact = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        lambda window, message, member: crossing.at < nth or member == 0
    )
    functions = ctypes.c_void_p.from_address(crossing.address)
    others = (ctypes.c_void_p * 6)(*(ctypes.c_void_p * 6).from_address(functions.value or 0))
    others[4] = ctypes.cast(intact, ctypes.c_void_p)
    functions.value = ctypes.addressof(others)
    return intact, others


@pytest.mark.parametrize(("nth", "stage"), [*enumerate(("0.counts", "0.dispatch", "0.combine"))])
def test_what_is_written_over_while_it_is_read_is_found(ranks: Ranks, nth: int, stage: str) -> None:
    """By the last look at a message."""
    walkers, kept = Ways(ranks, (True, True)).walkers(rows(3), rows(4, 1)), list[object]()

    def meanwhile() -> None:
        assert walkers[0].crossing is not None
        kept.append(lose(walkers[0].crossing, nth))

    errors = errors_of(walkers, meanwhile)
    words = f": rank 1's slot {nth % 2} was written over before it was read"
    assert_one_error(errors[:1], DivergedError, own(nth, stage) + words)


def test_who_never_sends_is_asked_for_until_the_deadline(ranks: Ranks) -> None:
    ways = Ways(ranks, (True, False))
    straight, other = ways.walkers(rows(3), rows(4, 1))
    with torch.inference_mode():
        straight.go_on()
        other.go_on()
        assert straight.arrived()
    assert straight.waits_for is not None
    crossing, handle = straight.waits_for
    assert crossing.at == 1
    assert len(crossing.moments()) == 1
    seconds, asked = iter(range(100)), []

    class Asked:
        timeout_s = crossing.timeout_s

        def poll(self, handle: None) -> bool:
            asked.append(crossing.poll(handle))
            return asked[-1]

    waiting = finish(Asked(), handle, "rank 0: 0.dispatch")
    with pytest.raises(CollectiveTimeoutError, match="no answer within 5 s: rank 0"):
        run_blocking(waiting, park=time.sleep, clock=lambda: float(next(seconds)))
    assert len(asked) > 5
    assert not any(asked)
    with torch.inference_mode():
        assert other.arrived()
        assert straight.arrived()


@pytest.mark.parametrize(("num", "members"), [(3, 2), (12, 1)])
def test_a_crossing_that_is_not_the_passs_is_refused(
    ranks: Ranks, tiny_folders: dict[str, Path], num: int, members: int
) -> None:
    ways = Ways(ranks, (True, True))
    alone = Ways(Ranks(tiny_folders["qwen3_moe"], ranks.config), (True,))
    communicator = (alone if members == 1 else ways).communicators[0]
    forward = ranks.model.forward(ranks.weights[0], ways.contexts[0], rows(3))
    stretch = forward.send(None)
    assert stretch.stages == tuple(ways.stages)
    tickets = tickets_of(ways.stages[:num])
    crossing = communicator.cross(tickets, tickets)
    words = f"a crossing of {num} messages between {members} members is not this pass's"
    with torch.inference_mode(), pytest.raises(ValueError, match=words):
        forward.send(crossing)


def test_a_crossing_is_over_an_open_window_and_its_slots(ranks: Ranks) -> None:
    ways = Ways(ranks, (True, True))
    channel = ways.communicators[0]._channel
    tickets = tickets_of(ways.stages)
    crossing = channel.cross(tickets, tickets)
    assert (crossing.at, crossing.moments()) == (0, [])
    assert not crossing.poll(None)
    tickets = tickets_of(ways.stages, first=1)
    with pytest.raises(ValueError, match="slot 2 of 2"):
        channel.cross([*tickets[:2], replace(tickets[2], slot=2)], tickets)
    with pytest.raises(TypeError, match="a crossing is over a Window"):
        EXTENSION.Crossing(channel, b"", 0)
    channel._window.close()
    for ask in (lambda: crossing.poll(None), lambda: channel.cross(tickets, tickets)):
        with pytest.raises(ValueError, match="the window is closed"):
            ask()
