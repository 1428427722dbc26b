"""What ranks write about themselves, and the one word that ends them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from interlace.comm.board import Board, SharedBoard, board_bytes
from interlace.comm.path import Op, Ticket
from interlace.comm.process_state import LivingProcess, started_at
from interlace.comm.rank_record import RECORD_BYTES, RankRecord, read_record
from interlace.comm.rank_status import Activity, ProcessState, RankStatus
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.store_board import StoreBoard

WORLD = 3


def ticket(seq: int, path: str = "decode", path_seq: int | None = None) -> Ticket:
    return Ticket(
        epoch=1,
        step=seq // 4,
        seq=seq,
        path=path,
        path_seq=seq if path_seq is None else path_seq,
        comm_seq=seq // 2,
        slot=0,
        op=Op(kind="Exchange", role="ep", stage=f"{seq % 40}.dispatch"),
        version=0,
        rows=1,
    )


def shared() -> Iterator[list[Board]]:
    memory = SharedMemory.create(board_bytes(WORLD))
    yield [
        SharedBoard(
            memory if rank == 0 else SharedMemory.open(memory.name, board_bytes(WORLD)),
            rank=rank,
            world=WORLD,
        )
        for rank in range(WORLD)
    ]


def over_a_store() -> Iterator[list[Board]]:
    """Three ranks whose clocks differ by hours, two of them on another host."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    hours = 3600.0

    def board(rank: int) -> StoreBoard:
        def clock() -> float:
            return time.monotonic() + rank * hours

        host = "here" if rank == 0 else "there"
        return StoreBoard(server.clone(), rank=rank, world=WORLD, clock=clock, host=host)

    yield [board(rank) for rank in range(WORLD)]


@pytest.fixture(params=[shared, over_a_store])
def boards(request: pytest.FixtureRequest) -> Iterator[list[Board]]:
    made = request.param()
    boards: list[Board] = next(made)
    yield boards
    for board in reversed(boards):
        board.close()


def until(true: object) -> None:
    """Until the function says yes: a store needs a moment."""
    assert callable(true)
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_everybody_sees_what_a_rank_does(boards: list[Board]) -> None:
    record, first, second = boards[1].record, ticket(8), ticket(9, "prefill", 0)
    record.computing(first)
    record.posted(first)
    record.settled(first)
    record.computing(second)
    record.posted(second)
    record.waiting(f"rank 1: {second}")
    record.beat("spin (test.py:3)", 2)
    for board in boards:
        until(lambda board=board: board.statuses()[1].activity is Activity.WAITING)
        seen = board.statuses()[1]
        assert seen.where == f"rank 1: {second}"
        assert [str(mark) for mark in seen.tickets] == [str(first), str(second)]
        assert [mark.reached for mark in seen.tickets] == ["settled", "posted"]
        assert (seen.pid, seen.place, seen.places) == (os.getpid(), "spin (test.py:3)", 2)
    ages = [board.statuses()[1] for board in boards[:1]]
    assert all(abs(time.monotonic() - status.since) < 5 for status in ages)
    record.going_on()
    until(lambda: boards[0].statuses()[1].activity is Activity.HOST)


def test_the_state_of_a_process_is_seen_from_its_own_host_and_told_to_others(
    boards: list[Board],
) -> None:
    for board in boards:
        until(lambda board=board: board.statuses()[2].process is ProcessState.RUNNING)
    assert boards[1].process(2) == os.getpid()
    assert boards[0].lost() == []


def test_the_first_verdict_is_everybodys(boards: list[Board]) -> None:
    assert not any(board.is_poisoned() for board in boards)
    assert boards[1].verdict() is None
    heard: list[bytes] = []
    writers = [
        threading.Thread(target=lambda b=board: heard.append(b.set_verdict(b"by %d" % b.rank)))
        for board in boards
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(heard)) == 1
    for board in boards:
        until(board.is_poisoned)
        assert board.verdict() == heard[0]


def test_an_outstanding_ticket_is_kept_however_many_others_pass() -> None:
    memory = memoryview(bytearray(RECORD_BYTES))
    record = RankRecord(memory)
    waits = ticket(0, "prefill", 0)
    record.computing(waits)
    record.posted(waits)
    for seq in range(1, 500):
        record.computing(ticket(seq))
        record.posted(ticket(seq))
        record.settled(ticket(seq))
    marks = read_record(memory, 0).tickets
    assert str(marks[0]) == str(waits)
    assert marks[0].reached == "posted"
    assert [mark.seq for mark in marks[1:]] == list(range(484, 500))


@contextmanager
def writing(script: str) -> Iterator[tuple[subprocess.Popen[bytes], SharedMemory]]:
    """A process that writes a record, once it does, and the record's memory."""
    memory = SharedMemory.create(RECORD_BYTES)
    command = [sys.executable, "-c", script, memory.name]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        yield writer, memory
    finally:
        writer.kill()
        writer.communicate()
        memory.close()


WRITER = """
import sys
from interlace.comm.path import Op, Ticket
from interlace.comm.process_state import LivingProcess, started_at
from interlace.comm.rank_record import RECORD_BYTES, RankRecord
from interlace.comm.shared_memory import SharedMemory

record = RankRecord(SharedMemory.open(sys.argv[1], RECORD_BYTES).buffer)
print("writing", flush=True)
for seq in range(10**9):
    op = Op(kind="Exchange", role="ep", stage=f"{seq}.dispatch")
    now = Ticket(epoch=seq, step=seq, seq=seq, path="decode", path_seq=seq, comm_seq=seq, slot=0,
                 op=op, version=0, rows=1)
    record.computing(now)
    if seq % 50 == 0:
        record.waiting(f"{seq} " * 40)
    elif seq % 50 == 25:
        record.going_on()
"""


def test_of_tickets_that_were_crossed_the_last_marks_are_kept_beside_those_of_other_paths() -> None:
    memory = memoryview(bytearray(RECORD_BYTES))
    seconds = iter(range(100, 200))
    record = RankRecord(memory, clock=lambda: float(next(seconds)))
    record.computing(ticket(0, "prefill"))
    record.posted(ticket(0, "prefill"))
    crossed = [ticket(seq) for seq in range(1, 21)]
    record.computing(crossed[0])
    moments = [(t.seq + 0.1, t.seq + 0.2, t.seq + 0.3, t.seq + 0.4, 0.1) for t in crossed]
    began = record.moved_at
    record.crossed(crossed, moments)
    assert record.moved_at == began + 1
    first, *marks = read_record(memory, 0).tickets
    assert (first.path, first.reached) == ("prefill", "posted")
    assert [mark.seq for mark in marks] == list(range(5, 21))
    for mark, of in zip(marks, crossed[-16:], strict=True):
        assert str(mark) == str(of)
        assert mark.reached == "settled"
        times = mark.computing_at, mark.posted_at, mark.settled_at
        assert times == (of.seq + 0.1, of.seq + 0.3, of.seq + 0.4)
    later = [ticket(seq) for seq in (21, 22)]
    record.crossed(later, moments[:2])
    assert [mark.seq for mark in read_record(memory, 0).tickets][1:] == list(range(7, 23))


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_read_while_another_process_writes_is_whole() -> None:
    seen: dict[float, RankStatus] = {}
    with writing(WRITER) as (_, memory):
        while len(seen) < 20:
            status = read_record(memory.buffer, 0)
            seen[status.since] = status
    for status in seen.values():
        for mark in status.tickets:
            assert mark.epoch == mark.step == mark.seq == mark.comm_seq
            assert mark.stage == f"{mark.seq}.dispatch"
        assert len(set(status.where.split())) <= 1


BUSY_WRITER = """
import sys
from interlace.comm.rank_record import RECORD_BYTES, RankRecord
from interlace.comm.shared_memory import SharedMemory

record = RankRecord(SharedMemory.open(sys.argv[1], RECORD_BYTES).buffer)
print("writing", flush=True)
while True:
    record.waiting("others")
    record.beat("here", 1)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_may_be_stopped_in_the_middle_of_saying_what_it_does() -> None:
    with writing(BUSY_WRITER) as (writer, memory):
        for _ in range(3000):
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            status = read_record(memory.buffer, 0)
            assert status.activity in (Activity.HOST, Activity.WAITING)
            assert status.alive_at > 0.0
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.0002)


def test_bytes_nobody_wrote_are_a_rank_nobody_has_heard_of() -> None:
    assert read_record(bytes(RECORD_BYTES), 4).activity is Activity.ABSENT


def test_a_process_is_asked_for_its_end_without_a_look_at_its_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = started_at(process.pid)
        assert LivingProcess.find(process.pid, started + 1) is None
        living = LivingProcess.find(process.pid, started)
        if living is None:
            process.kill()
            pytest.skip("this system has no descriptors for processes")
        assert not living.has_ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has, and is not buried yet
        assert living.has_ended()
        living.close()
    assert LivingProcess.find(process.pid, started) is None
