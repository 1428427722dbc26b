"""Runs one rank's coroutine in its own process: waits, with a deadline, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .collectives import Early, Finish, Forward, Park
from .errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from .progress import NoProgress, Progress
from .waiter import SleepWaiter, Waiter

LONGEST_WAIT_S = 0.05
"""`check` is called at least so often during a wait."""


def run_blocking(
    rank: Forward,
    *,
    park: Callable[[float], None],
    waiter: Waiter | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
    patience: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Drive the coroutine to its return. `park(seconds)` sleeps until there is work to take in.

    `check` raises if this rank is to give up; it is asked before every wait and during it.
    Raises CollectiveTimeoutError, saying what was waited for, once a wait outlasts both its
    communicator's `timeout_s` and `patience()`, and PeerLostError if the transport gives up.
    """
    waits = _Waits(
        waiter or SleepWaiter(),
        check or _go_on,
        progress or NoProgress(),
        patience or _none,
        clock,
    )
    value = None
    while True:
        try:
            request = rank.send(value)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Finish):
            value = waits.finish(request)
        elif isinstance(request, Park):
            waits.check()
            park(request.ms / 1000)
            value = None
        else:
            raise TypeError(f"a rank suspended on {request!r}; only Finish and Park are answered")


def _go_on() -> None:
    pass


def _none() -> float:
    return 0.0


class _Waits:
    """Answers `Finish`."""

    def __init__(
        self,
        waiter: Waiter,
        check: Callable[[], None],
        progress: Progress,
        patience: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.check, self._patience = check, patience
        self._waiter, self._progress, self._clock = waiter, progress, clock

    def finish(self, request: Finish) -> Any:
        try:
            if request.communicator.poll(request.handle):
                answer = request.communicator.result(request.handle)
            else:
                self._progress.waiting(str(request.where))
                answer = self._wait(request)
                self._progress.going_on()
            self._waiter.arm()  # what others post from here on ends a rest that comes next
            return answer
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise PeerLostError(f"the transport gave up: {request.where}: {error}") from error

    def _wait(self, request: Finish) -> Any:
        communicator, handle = request.communicator, request.handle
        seconds = max(communicator.timeout_s, self._patience())
        deadline = self._clock() + seconds
        self._waiter.begin()
        while True:
            self._waiter.arm()
            if communicator.poll(handle):
                return communicator.result(handle)
            for index, (other, its_handle) in enumerate(request.others):
                if other.poll(its_handle):
                    return Early(index=index, value=other.result(its_handle))
            self.check()
            if request.busy:
                return Early(index=len(request.others), value=None)
            if self._clock() > deadline:
                raise CollectiveTimeoutError(
                    f"no answer within {seconds:g} s: {request.where}; "
                    "a rank of this group is dead, stuck or far behind"
                )
            self._waiter.wait(LONGEST_WAIT_S)
