"""Ranks as threads with a board, a driver and a watchdog each; and what happens without one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interlace.comm.board import SharedBoard, board_bytes
from interlace.comm.collectives import finish
from interlace.comm.driver import run_blocking
from interlace.comm.errors import (
    CollectiveTimeoutError,
    OrderError,
    PeerLostError,
    RankFailureError,
)
from interlace.comm.path import Op, Ticket
from interlace.comm.rank_record import RankRecord
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.watchdog import EXIT_CODE, Watchdog

pytestmark = pytest.mark.slow

TICKET = Ticket(
    epoch=0,
    step=3,
    seq=41,
    path="decode",
    path_seq=20,
    comm_seq=20,
    slot=0,
    op=Op(kind="Exchange", role="ep", stage="7.dispatch"),
    version=0,
    rows=1,
)
DEADLINE_S = 1.5
SLACK_S = 5.0
"""Of a busy machine; alone it is a tenth of a second."""


class Never:
    """A communicator whose collective is never complete."""

    timeout_s = DEADLINE_S

    def poll(self, handle: Any) -> bool:
        return False

    def result(self, handle: Any) -> Any:
        raise AssertionError


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(board_bytes(2))
    yield memory
    memory.close()


@pytest.fixture
def boards(memory: SharedMemory) -> Iterator[list[SharedBoard]]:
    made = [
        SharedBoard(SharedMemory.open(memory.name, memory.size), rank=rank, world=2)
        for rank in (0, 1)
    ]
    yield made
    for board in made:
        board.close()


def waits(board: SharedBoard, watchdog: Watchdog | None) -> BaseException:
    """Post the ticket, wait for it, and give back what the rank raises in the end."""
    record = board.record
    record.computing(TICKET)
    record.posted(TICKET)
    check = watchdog.check if watchdog else None
    waiting = finish(Never(), None, f"rank {board.rank}: {TICKET}")
    try:
        run_blocking(waiting, park=time.sleep, check=check, progress=record)
    except Exception as error:
        return watchdog.explain(error) if watchdog else error
    raise AssertionError


def ignore(error: RankFailureError) -> None:
    pass


def watched(board: SharedBoard, **options: Any) -> Watchdog:
    options = {"report": ignore, "exit_after_s": None, **options}
    return Watchdog(board, **options)


def outcome(boards: list[SharedBoard], stuck: Callable[[SharedBoard], None]) -> RankFailureError:
    """What rank 0 raises while rank 1 is in `stuck`, which ends once there is a verdict."""

    def other() -> None:
        with watched(boards[1]):
            boards[1].record.computing(TICKET)
            stuck(boards[1])

    thread = threading.Thread(target=other)
    thread.start()
    began = time.monotonic()
    with watched(boards[0]) as watchdog:
        error = waits(boards[0], watchdog)
    took = time.monotonic() - began
    thread.join()
    assert isinstance(error, RankFailureError)
    assert DEADLINE_S <= took < DEADLINE_S + SLACK_S
    assert [rank.rank for rank in error.diagnosis.causes] == [1], error
    assert str(error).startswith(f"{TICKET}: rank 1 is ")
    return error


def spins(board: SharedBoard) -> None:
    while not board.is_poisoned():
        pass


def sleeps(board: SharedBoard) -> None:
    while not board.is_poisoned():
        time.sleep(0.2)


def computes(board: SharedBoard) -> None:
    """Different lines all the time."""
    lines = "\n".join("sum(range(20_000))" for _ in range(2000))
    work = compile(lines, "work.py", "exec")
    while not board.is_poisoned():
        exec(work)


@pytest.mark.parametrize(("stuck", "name"), [(spins, "spins"), (sleeps, "sleeps")])
def test_a_rank_that_stands_still_is_blocked_and_the_place_is_named(
    boards: list[SharedBoard], stuck: Callable[[SharedBoard], None], name: str
) -> None:
    error = outcome(boards, stuck)
    (cause,) = error.diagnosis.causes
    assert cause.verdict == "BLOCKED"
    assert f"{name} (test_watchdog.py:" in cause.what
    assert "never posted it; in host code for" in cause.what


def test_a_rank_that_gets_on_but_not_in_time_is_slow(boards: list[SharedBoard]) -> None:
    (cause,) = outcome(boards, computes).diagnosis.causes
    assert cause.verdict == "SLOW", cause


def test_without_a_watchdog_the_same_wait_names_nobody(boards: list[SharedBoard]) -> None:
    began = time.monotonic()
    error = waits(boards[0], None)
    assert time.monotonic() - began >= DEADLINE_S
    assert isinstance(error, CollectiveTimeoutError)
    assert not any(name in str(error) for name in ("BLOCKED", "SLOW", "rank 1"))


def test_what_one_rank_raises_the_others_raise_long_before_any_deadline(
    boards: list[SharedBoard],
) -> None:
    raised: list[RankFailureError] = []

    def other() -> None:
        with watched(boards[1]) as watchdog:
            raised.append(watchdog.explain(OrderError("rank 1: asks for 7.combine")))

    thread = threading.Thread(target=other)
    with watched(boards[0]) as watchdog:
        began = time.monotonic()
        thread.start()
        error = waits(boards[0], watchdog)
        assert time.monotonic() - began < DEADLINE_S
    thread.join()
    assert isinstance(error, RankFailureError)
    assert error.diagnosis == raised[0].diagnosis
    assert "rank 1 is DIVERGED: OrderError: rank 1: asks for 7.combine" in str(error)


def test_the_first_to_fail_is_the_one_that_counts(boards: list[SharedBoard]) -> None:
    first = watched(boards[0]).explain(ValueError("first"))
    second = watched(boards[1]).explain(ValueError("second"))
    assert "rank 0 is RAISED: ValueError: first" in str(first)
    assert str(second) == str(first)
    with pytest.raises(RankFailureError, match="ValueError: first"):
        watched(boards[1]).check()


DIES = """
import os, signal, sys
from interlace.comm.board import SharedBoard, board_bytes
from interlace.comm.shared_memory import SharedMemory

board = SharedBoard(SharedMemory.open(sys.argv[1], board_bytes(2)), rank=1, world=2)
if sys.argv[2] == "left":
    board.record.left()
print("there", flush=True)
signal.pause()
"""


@pytest.fixture
def board(memory: SharedMemory) -> Iterator[SharedBoard]:
    board = SharedBoard(SharedMemory.open(memory.name, memory.size), rank=0, world=2)
    yield board
    board.close()


@pytest.fixture
def another(memory: SharedMemory) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Rank 1 as a process that is there and does nothing."""
    started = []

    def start(how: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DIES, memory.name, how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_process_that_has_ended_is_dead_at_once(
    board: SharedBoard, another: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    process = another("dies")
    process.kill()
    with watched(board) as watchdog:
        error = waits(board, watchdog)
    assert f"rank 1 is DEAD: its process {process.pid} has ended without a last word" in str(error)


@pytest.mark.processes
def test_a_lost_connection_waits_for_its_cause(
    board: SharedBoard, another: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    another("dies").kill()
    error = watched(board).explain(PeerLostError("connection closed by peer"))
    assert "rank 1 is DEAD" in str(error)


@pytest.mark.processes
def test_a_rank_that_has_left_in_order_may_end(
    board: SharedBoard, another: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    process = another("left")
    process.kill()
    process.wait()
    assert board.process(1) == 0
    assert board.lost() == []


def test_a_rank_that_does_not_raise_what_has_happened_is_spoken_for_and_ended(
    boards: list[SharedBoard],
) -> None:
    """Its own thread stands still, as it would inside a collective of gloo or CUDA."""
    told: list[RankFailureError] = []
    code, ended = [], threading.Event()

    def leave(number: int) -> None:
        code.append(number)
        ended.set()

    watched(boards[0]).explain(ValueError("elsewhere"))
    with watched(boards[1], report=told.append, exit_after_s=0.5, leave=leave):
        assert ended.wait(30)
    assert code[0] == EXIT_CODE == 70
    assert [str(error) for error in told] == [str(error) for error in told[:1]] != []
    assert "rank 0 is RAISED: ValueError: elsewhere" in str(told[0])


def test_ranks_that_a_device_holds_all_together_are_not_waited_for(
    boards: list[SharedBoard],
) -> None:
    """Nobody polls, so nobody's deadline runs out but the watchdog's."""
    over = threading.Event()
    with watched(boards[0], report=lambda error: over.set(), blocking_s=0.2):
        assert over.wait(30)
    assert boards[1].is_poisoned()


def test_a_wait_that_looks_at_no_deadline_is_ended_by_the_watchdog(
    boards: list[SharedBoard],
) -> None:
    """As one inside gloo: nothing of ours is called until it returns."""
    over = threading.Event()
    boards[0].record.waiting("rank 0: every rank makes the communicators")
    options = {"report": lambda error: over.set(), "longest_wait": lambda began: 0.3}
    with watched(boards[1]), watched(boards[0], **options):
        assert over.wait(30)
        error = watched(boards[0]).explain(ValueError("late"))
    assert str(error).startswith("every rank makes the communicators: rank 1 is ")


def test_telling_costs_less_than_a_microsecond_and_a_half() -> None:
    record = RankRecord(memoryview(bytearray(32768)))
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(100):
            record.computing(TICKET)
            record.posted(TICKET)
            record.settled(TICKET)
        best = min(best, (time.perf_counter() - began) / 300)
    assert best < 1.5e-6
