"""Runs one rank from loading to its last word."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

from interlace.comm.collectives import Finish, Forward, Gather, perform
from interlace.comm.driver import run_blocking
from interlace.comm.errors import RankFailureError
from interlace.comm.journal import Journal
from interlace.comm.watchdog import Watchdog
from interlace.moe import kernels
from interlace.rollout.config import RolloutConfig
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Event, RankFailure, RankReport

from .compose import blocks_for, compose
from .deadlines import Deadlines
from .memory import agreed_minimum
from .processes import ProcessTransport
from .rare_collections import rare_collections
from .silent_ranks import end_silent_ranks
from .transport import Transport

_NAME_BYTES = 32


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
        diagnosis=error.diagnosis if isinstance(error, RankFailureError) else None,
    )


def run_process(
    config: RolloutConfig,
    folder: FilePath,
    transport: ProcessTransport,
    inbox: Inbox,
    emit: Callable[[Event], None],
    killed: threading.Event,
    *,
    exit_after_s: float | None,
) -> None:
    """A rank process from loading to its last word: RankReport, or RankFailure and the error.

    Once `killed` is set the next wait raises Killed. If any rank fails all of them raise one
    RankFailureError; what cannot leave by itself then is ended: this process after
    `exit_after_s` (None: never), others of this host that have fallen silent.
    """
    rank, board = transport.rank, transport.board
    unsaid = threading.Lock()

    def say_failure(error: BaseException) -> None:
        if unsaid.acquire(blocking=False):  # the watchdog may have spoken for this thread
            emit(failure(rank, error))

    deadlines = Deadlines(board.record, config.launch)
    watchdog = Watchdog(
        board,
        report=say_failure,
        exit_after_s=exit_after_s,
        longest_wait=deadlines.longest_wait,
        blocking_s=_blocking_s(config, transport),
    )
    try:
        with watchdog:
            try:
                done = _run(config, folder, transport, inbox, emit, killed, watchdog, deadlines)
            except Killed:
                board.record.left()
                raise
            except BaseException as error:
                explained = watchdog.explain(error)
                say_failure(explained)
                board.record.failed(f"{type(explained).__name__}: {explained}")
                raise explained from error
            board.record.left()
    except RankFailureError:
        end_silent_ranks(board, silent_s=watchdog.silent_s)
        raise
    except BaseException as error:
        say_failure(error)
        raise
    emit(done)


def _run(
    config: RolloutConfig,
    folder: FilePath,
    transport: ProcessTransport,
    inbox: Inbox,
    emit: Callable[[Event], None],
    killed: threading.Event,
    watchdog: Watchdog,
    deadlines: Deadlines,
) -> RankReport:
    def park(seconds: float) -> None:
        check()
        transport.waiter.rest(seconds, lambda: inbox.has_commands)

    def check() -> None:
        watchdog.check()  # first: a failure is why others want this rank ended
        _check(killed)

    def drive(work: Forward, patience: Callable[[], float] | None = None) -> Any:
        return run_blocking(
            work,
            park=park,
            waiter=transport.waiter,
            check=check,
            progress=deadlines,
            patience=patience,
        )

    inbox.tell(transport.waiter.rouse)
    kernels.choose(config.model.kernels)
    mine = blocks_for(config, folder, transport.device)
    num_blocks = drive(agreed_minimum(transport, mine, deadlines.loading_s()))
    rank = compose(
        config, folder, transport, inbox, emit, num_blocks=num_blocks, progress=deadlines
    )
    # Ranks load at different speeds; the short deadlines hold from here on.
    drive(_meet(transport, deadlines.loading_s(), kernels.instructions()))
    if rank.first_use is not None:
        drive(rank.first_use())
    transport.complete()
    emit(rank.ready)
    ready_at = time.process_time()
    deadlines.expect(rank.paths)
    with rank.stager, rare_collections():
        journal = drive(rank.engine.run(), deadlines.patience)
    return report(transport.rank, journal, time.process_time() - ready_at)


def _blocking_s(config: RolloutConfig, transport: ProcessTransport) -> float | None:
    """On a GPU the host waits inside the device's library, where no deadline of ours is seen."""
    launch = config.launch
    if transport.device.type == "cpu":
        return None
    return max(launch.load_timeout_s, launch.ticket_timeout_s, launch.exchange_timeout_s)


class Killed(Exception):
    """Ends a rank that is not wanted any more."""


def _check(killed: threading.Event) -> None:
    if killed.is_set():
        raise Killed("its program left the rollout early, or rank 0 was gone")


async def _meet(transport: Transport, timeout_s: float, instructions: str) -> None:
    """Raises ValueError unless all ranks that compute on a CPU do it with the same kernels."""
    control = transport.control(timeout_s)
    told = instructions if transport.device.type == "cpu" else ""
    payload = told.encode().ljust(_NAME_BYTES, b"\0")
    handle = control.post(Gather(role="control", stage="loaded", payload=payload), None)
    where = f"rank {transport.rank}: every rank has loaded its weights"
    answers = await perform(Finish(communicator=control, handle=handle, where=where))
    names = [bytes(answer).rstrip(b"\0").decode() or "torch" for answer in answers]
    if len(set(names)) > 1:
        each = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(names))
        raise ValueError(
            f"ranks compute with different kernels, whose bits differ: {each}. Set model.kernels "
            "to one that all their processors have"
        )
