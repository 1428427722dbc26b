"""Ends, after a failure, the ranks of this host that cannot end themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from interlace.comm.board import Board
from interlace.comm.diagnosis import SILENT_S, is_silent
from interlace.comm.rank_status import Activity, ProcessState

_LAST = (Activity.FAILED, Activity.LEFT)
GRACE_S = 1.5
"""What ranks have to notice a failure and to leave by themselves."""


def end_silent_ranks(
    board: Board, *, silent_s: float = SILENT_S, grace_s: float = GRACE_S
) -> list[int]:
    """Kill what is stopped, or has shown no sign of life, once everybody has had time to leave.

    Returns the ranks it killed. A process whose watchdog runs is left to it, and one that has said
    its last word to itself.
    """
    others = [rank for rank in range(board.world) if rank != board.rank]
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _some_stay(board):
        time.sleep(0.05)
    killed = []
    for status in board.statuses():
        pid = board.process(status.rank)
        if status.rank not in others or pid in (0, os.getpid()) or status.activity in _LAST:
            continue
        if status.process is ProcessState.STOPPED or is_silent(status, time.monotonic(), silent_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(status.rank)
    return killed


def _some_stay(board: Board) -> bool:
    """Whether another rank of this host has neither ended nor said its last word."""
    return any(
        status.activity not in _LAST and board.process(status.rank)
        for status in board.statuses()
        if status.rank != board.rank
    )
