"""Asleep until something was posted, and not longer."""

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from tests.comm.windows_in_memory import EXTENSION, PATH, ROLE, end, memories

from interlace.comm import window_layout as at
from interlace.comm.doorbell import DoorbellWaiter, ReferenceDoorbell
from interlace.comm.waiter import RankWaiter, SleepWaiter
from interlace.comm.window_reference import Window

LONG_S = 30.0
RINGERS = ["python"] if EXTENSION is None else ["c++", "python"]
needs_extension = pytest.mark.skipif(EXTENSION is None, reason="built without a compiler")


def post(kind: str, bell: bytearray) -> None:
    """Message 0 of a group whose other member owns the doorbell."""
    end(kind, memories(2), 0, bells=[bell]).post(0, 0, 0, 0, 7, at.GATHER, b"", (0, 0))


def asleep(bell: bytearray) -> bool:
    return bell[at.SLEEPING] == 1


def ringing(own: str, bell: bytearray) -> Any:
    return EXTENSION.Doorbell(bell) if own == "c++" else ReferenceDoorbell(bell)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


@needs_extension
@pytest.mark.parametrize("kind", RINGERS)
def test_a_post_wakes_a_rank_that_sleeps(kind: str) -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    waiter = DoorbellWaiter(EXTENSION.Doorbell(bell), spin_ns=0)
    waiter.begin()
    waiter.arm()
    rank = threading.Thread(target=waiter.wait, args=(LONG_S,))
    began = time.monotonic()
    rank.start()
    until(lambda: asleep(bell))
    post(kind, bell)
    rank.join()
    assert time.monotonic() - began < LONG_S / 2
    assert not asleep(bell)


@pytest.mark.parametrize("kind", RINGERS)
@pytest.mark.parametrize("own", RINGERS)
def test_what_rang_between_the_look_and_the_wait_ends_it_at_once(own: str, kind: str) -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    waiter = DoorbellWaiter(ringing(own, bell), spin_ns=0)
    waiter.arm()
    post(kind, bell)
    began = time.monotonic()
    waiter.wait(LONG_S)
    assert time.monotonic() - began < LONG_S / 2


class Heard:
    """A doorbell that notes how long it was told to wait."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, int]] = []

    def heard(self) -> int:
        return 5

    def wait(self, heard: int, until_ns: int, spin_ns: int, /) -> None:
        assert heard == 5
        self.waits.append((until_ns - time.monotonic_ns(), spin_ns))

    def close(self) -> None: ...


def test_a_wait_ends_when_the_next_message_is_visible_and_does_not_spin_for_it() -> None:
    bell = Heard()
    waiter = DoorbellWaiter(bell, spin_ns=1_000)
    waiter.arm()
    waiter.wait(0.05)
    now = time.monotonic_ns()
    for at_ns in (now + 10**10, now + 10**9, now + 2 * 10**9):
        waiter.due(at_ns)
    waiter.wait(LONG_S)
    waiter.arm()
    waiter.wait(0.05)
    assert [spin for _, spin in bell.waits] == [1_000, 0, 1_000]
    assert bell.waits[0][0] <= 0.05e9
    assert 0.05e9 < bell.waits[1][0] <= 10**9
    assert bell.waits[2][0] <= 0.05e9


@pytest.mark.parametrize(
    ("own", "stirred"),
    # A rank without a doorbell is told nothing by a post.
    [*product(RINGERS, ["rouse", "post", "ready"]), *product(["none"], ["rouse", "ready"])],
)
def test_a_rank_rests_until_it_is_roused_or_waited_for(own: str, stirred: str) -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    waiter: RankWaiter = SleepWaiter()
    if own != "none":
        waiter = DoorbellWaiter(ringing(own, bell), spin_ns=0)
    asked = threading.Event()

    def is_ready() -> bool:
        asked.set()
        return stirred == "ready"

    rank = threading.Thread(target=waiter.rest, args=(LONG_S, is_ready))
    began = time.monotonic()
    rank.start()
    asked.wait(LONG_S)
    if stirred == "rouse":
        waiter.rouse()
    elif stirred == "post":
        post(RINGERS[0], bell)
    rank.join()
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("kind", ["rouse", "post"])
@pytest.mark.parametrize("own", RINGERS)
def test_a_rank_that_was_waited_for_on_its_way_to_a_rest_does_not_rest(own: str, kind: str) -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    waiter = DoorbellWaiter(ringing(own, bell), spin_ns=0)
    waiter.arm()
    if kind == "rouse":
        waiter.rouse()
    else:
        post(RINGERS[0], bell)
    began = time.monotonic()
    waiter.rest(LONG_S, lambda: False)
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("own", RINGERS)
def test_whoever_is_gone_is_not_roused(own: str) -> None:
    doorbell = ringing(own, bytearray(at.DOORBELL_BYTES))
    waiter = DoorbellWaiter(doorbell, spin_ns=0)
    doorbell.close()
    waiter.rouse()


@needs_extension
def test_waiting_takes_no_processor_time() -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    waiter = DoorbellWaiter(
        EXTENSION.Doorbell(bell), spin_ns=20_000, wake_on_time=EXTENSION.wake_on_time
    )
    waiter.begin()
    waiter.arm()
    used = time.thread_time()
    began = time.monotonic()
    waiter.wait(0.2)
    assert time.monotonic() - began >= 0.2
    assert time.thread_time() - used < 0.02


@needs_extension
def test_a_closed_doorbell_is_not_used_again() -> None:
    bell = bytearray(at.DOORBELL_BYTES)
    doorbell = EXTENSION.Doorbell(bell)
    doorbell.close()
    bell.clear()
    with pytest.raises(ValueError, match="closed"):
        doorbell.heard()


def test_in_one_process_a_group_needs_no_doorbells() -> None:
    shared = memories(2)
    one, other = (Window(shared, me, 2, 4096, PATH, ROLE) for me in (0, 1))
    for window in (one, other):
        window.post(0, 0, 0, 0, 7, at.GATHER, b"", (0, 0))
    assert one.poll(0, 0) == other.poll(0, 0) == 0
