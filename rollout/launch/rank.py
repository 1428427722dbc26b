"""Runs one rank from loading to its last word."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path as FilePath

from interlace.comm.collectives import Finish, Gather, perform
from interlace.comm.driver import run_blocking
from interlace.comm.journal import Journal
from interlace.rollout.config import RolloutConfig
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Event, RankFailure, RankReport

from .compose import blocks_for, compose
from .memory import agreed_minimum
from .transport import Transport


def report(rank: int, journal: Journal, cpu_s: float) -> RankReport:
    """The last word of a rank that left its loop in order."""
    return RankReport(
        rank=rank, cpu_s=cpu_s, steps=list(journal.steps), tickets=list(journal.tickets)
    )


def failure(rank: int, error: BaseException) -> RankFailure:
    """The last word of a rank that raised."""
    return RankFailure(
        rank=rank,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def run_process(
    config: RolloutConfig,
    folder: FilePath,
    transport: Transport,
    inbox: Inbox,
    emit: Callable[[Event], None],
    killed: threading.Event,
) -> None:
    """A rank process from loading to its last word: RankReport, or RankFailure and the error.

    Once `killed` is set the next wait raises Killed.
    """

    def park(seconds: float) -> None:
        _check(killed)
        inbox.wait(seconds)

    def check() -> None:
        _check(killed)

    waiter = transport.waiter
    try:
        mine = blocks_for(config, folder, transport.device)
        agreeing = agreed_minimum(transport, mine, config.launch.load_timeout_s)
        num_blocks = run_blocking(agreeing, park=park, waiter=waiter, check=check)
        rank = compose(config, folder, transport, inbox, emit, num_blocks=num_blocks)
        # Ranks load at different speeds; the short deadlines hold from here on.
        meeting = _meet(transport, config.launch.load_timeout_s)
        run_blocking(meeting, park=park, waiter=waiter, check=check)
        emit(rank.ready)
        ready_at = time.process_time()
        journal = run_blocking(rank.engine.run(), park=park, waiter=waiter, check=check)
    except BaseException as error:
        emit(failure(transport.rank, error))
        raise
    emit(report(transport.rank, journal, time.process_time() - ready_at))


class Killed(Exception):
    """Ends a rank that is not wanted any more."""


def _check(killed: threading.Event) -> None:
    if killed.is_set():
        raise Killed("its program left the rollout early, or rank 0 was gone")


async def _meet(transport: Transport, timeout_s: float) -> None:
    control = transport.control(timeout_s)
    handle = control.post(Gather(role="control", stage="loaded", payload=b"loaded"), None)
    where = f"rank {transport.rank}: every rank has loaded its weights"
    await perform(Finish(communicator=control, handle=handle, where=where))
