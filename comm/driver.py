"""Runs one rank's coroutine in its own process: waits, with a deadline, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .collectives import Finish, Forward, Park
from .errors import CollectiveTimeoutError, CommunicationError, PeerLostError


def run_blocking(
    rank: Forward,
    *,
    park: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Any:
    """Drive the coroutine to its return. `park(seconds)` sleeps until there is work to take in.

    Raises CollectiveTimeoutError, saying what was waited for, once a wait outlasts its
    communicator's `timeout_s`, and PeerLostError if the transport itself gives up.
    """
    value = None
    while True:
        try:
            request = rank.send(value)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Park):
            park(request.ms / 1000)
            value = None
        elif isinstance(request, Finish):
            value = _finish(request, clock, pause)
        else:
            raise TypeError(f"a rank suspended on {request!r}; only Finish and Park are answered")


def _finish(request: Finish, clock: Callable[[], float], pause: Callable[[float], None]) -> Any:
    try:
        _wait(request, clock, pause)
        return request.communicator.result(request.handle)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise PeerLostError(f"the transport gave up: {request.where}: {error}") from error


def _wait(request: Finish, clock: Callable[[], float], pause: Callable[[float], None]) -> None:
    communicator = request.communicator
    if communicator.poll(request.handle):
        return
    deadline = clock() + communicator.timeout_s
    polls = 0
    while not communicator.poll(request.handle):
        polls += 1
        # Always let go of the core: on a CPU the transport's own threads need it.
        pause(2e-5 if polls < 200 else 5e-4)
        if clock() > deadline:
            raise CollectiveTimeoutError(
                f"no answer within {communicator.timeout_s:g} s: {request.where}; "
                "a rank of this group is dead, stuck or far behind"
            )
