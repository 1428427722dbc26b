"""Turns asked of the ranks, as futures of the collector's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from interlace.comm.verdict import Diagnosis

from .messages import Abort, Command, Event, RankFailure, TurnRequest, TurnResult


class RolloutError(RuntimeError):
    """A rank failed; every trajectory it was working on is lost with it.

    `diagnosis` says what every rank was doing; None where ranks are not processes.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class TurnAborted(Exception):
    """The trajectory was aborted between two of its turns."""


class Turns:
    """One outstanding turn per trajectory. Lives in the event loop, and so do its callers."""

    def __init__(self, send: Callable[[int, Command], None]) -> None:
        self._send = send
        self._waiting: dict[int, tuple[int, asyncio.Future[TurnResult]]] = {}
        self._aborted: set[int] = set()
        self._failure: RolloutError | None = None
        self.asked: list[tuple[int, float]] = []
        """Trajectory and time of every turn asked, by the clock of this host's ranks."""

    async def generate(self, leader: int, request: TurnRequest) -> TurnResult:
        """Ask and wait; cancelling aborts the turn.

        Raises TurnAborted if the trajectory was aborted before, RolloutError if a rank has failed.
        """
        number = request.trajectory
        if self._failure is not None:
            raise self._failure
        if number in self._aborted:
            self._aborted.remove(number)
            raise TurnAborted
        future: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self._waiting[number] = leader, future
        self.asked.append((number, time.monotonic()))
        try:
            self._send(leader, request)
            return await future
        except asyncio.CancelledError:
            self._send(leader, Abort(trajectory=number))
            raise
        finally:
            del self._waiting[number]

    def abort(self, trajectory: int) -> None:
        """End the trajectory at its running turn, whose partial result counts, or its next."""
        if trajectory in self._waiting:
            leader, _ = self._waiting[trajectory]
            self._send(leader, Abort(trajectory=trajectory))
        else:
            self._aborted.add(trajectory)

    def deliver(self, event: Event) -> None:
        """A result wakes its trajectory; a failure wakes all with an error."""
        match event:
            case TurnResult():
                _, future = self._waiting.get(event.trajectory, (0, None))
                if future is not None and not future.done():
                    future.set_result(event)
            case RankFailure():
                self._failure = self._failure or RolloutError(event.text, event.diagnosis)
                for _, future in self._waiting.values():
                    if not future.done():
                        future.set_exception(self._failure)
