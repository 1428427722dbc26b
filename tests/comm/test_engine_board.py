"""One board for ranks that step in two groups: diagnosed apart, ended together."""

from __future__ import annotations

import pytest
from tests.comm.test_board import ticket

from interlace.comm.board import SharedBoard, board_bytes
from interlace.comm.diagnosis import diagnose
from interlace.comm.engine_board import EngineBoard
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.verdict import decode

ENGINES = ((0, 1), (2, 3))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def boards(clock):
    size = board_bytes(4)
    own = SharedMemory.create(size)
    inner = [
        SharedBoard(
            own if rank == 0 else SharedMemory.open(own.name, size), rank=rank, world=4, clock=clock
        )
        for rank in range(4)
    ]
    yield [EngineBoard(board, ENGINES, silent_s=5.0, clock=clock) for board in inner]
    for board in inner:
        board.close()


def found_by(board: EngineBoard, clock: Clock) -> bytes:
    return diagnose(board.statuses(), by=board.rank, now=clock()).encode()


def test_a_rank_sees_those_it_steps_with(boards):
    seen = [[status.rank for status in board.statuses()] for board in boards]
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_other_tickets_under_the_same_number_are_no_divergence(boards, clock):
    for board, path in zip(boards, ("decode", "decode", "prefill", "prefill"), strict=True):
        board.record.computing(ticket(4, path))
    boards[1].record.failed("ValueError: odd")
    found = decode(found_by(boards[1], clock))
    assert [rank.verdict for rank in found.ranks] == ["RUNNING", "RAISED"]


def test_a_verdict_ends_all_and_says_whom_it_is_about(boards, clock):
    boards[3].record.failed("ValueError: odd")
    boards[3].set_verdict(found_by(boards[3], clock))
    assert all(board.is_poisoned() for board in boards)
    texts = {decode(board.verdict()).text for board in boards}
    assert len(texts) == 1
    assert texts.pop().startswith("replica 1 of 2: rank 3 is RAISED: ValueError: odd")


def test_an_engine_that_stands_still_is_lost_to_the_others(boards, clock):
    for _ in range(7):
        clock.now += 1.0
        for board in boards[:2]:
            board.record.beat("", 0)
        lost = [board.lost() for board in boards[:2]]
    assert lost == [[2, 3], [2, 3]]
    found = decode(found_by(boards[0], clock))
    assert [rank.rank for rank in found.causes] == [2, 3]
    assert [rank.verdict for rank in found.causes] == ["BLOCKED", "BLOCKED"]


def test_those_that_wait_for_a_rank_find_out_by_themselves(boards, clock):
    for _ in range(7):
        clock.now += 1.0
        for board in (boards[0], boards[2], boards[3]):
            board.record.beat("", 0)
        assert boards[0].lost() == []
    assert boards[2].lost() == [1]


def test_a_rank_that_has_said_its_last_word_is_not_lost(boards, clock):
    boards[3].record.left()
    for _ in range(7):
        clock.now += 1.0
        for board in boards[:3]:
            board.record.beat("", 0)
        assert boards[0].lost() == []
