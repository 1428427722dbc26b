"""Turns asked of the ranks, as futures of the collector's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from interlace.comm.verdict import Diagnosis

from .messages import (
    Abort,
    Command,
    Event,
    Held,
    Pause,
    RankFailure,
    Resume,
    TurnRequest,
    TurnResult,
)

PauseMode = Literal["keep", "abort"]
_T = TypeVar("_T")


class RolloutError(RuntimeError):
    """A rank failed, and all the others end with it; `Run.partials` has what was in play.

    `diagnosis` says what every rank was doing; None where ranks are not processes.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class TurnAborted(Exception):
    """The trajectory was aborted while no turn of it ran."""


class Barrier(Protocol):
    """Where trajectories have to wait for an update. Told in the collector's event loop."""

    def holds(self, trajectory: int, num_sampled: int) -> list[tuple[int, int]]:
        """Those ahead of a trajectory that has sampled so many tokens, for its next request."""
        ...

    def held(self, trajectory: int, version: int) -> None:
        """It has come to the hold before `version`."""
        ...

    def ended(self, trajectory: int) -> None:
        """It samples no more."""
        ...


class Turns:
    """One outstanding turn per trajectory. Lives in the event loop, and so do its callers."""

    def __init__(
        self,
        send: Callable[[int, Command], None],
        *,
        num_leaders: int = 1,
        barrier: Barrier | None = None,
    ) -> None:
        """`barrier`: None where no update is scheduled at token positions."""
        self._send, self._num_leaders, self._barrier = send, num_leaders, barrier
        self._waiting: dict[int, tuple[int, asyncio.Future[TurnResult]]] = {}
        self._interruptible: dict[int, asyncio.Future[Exception]] = {}
        self._aborted: set[int] = set()
        self._paused: PauseMode | None = None
        self._open = asyncio.Event()
        self._open.set()
        self.failure: RolloutError | None = None
        """What a rank has failed with; no turn will be answered any more."""
        self.asked: list[tuple[int, float]] = []
        """Trajectory and time of every turn asked, by the clock of this host's ranks."""

    async def generate(
        self, leader: int, request: TurnRequest, *, num_sampled: int = 0
    ) -> TurnResult:
        """Ask and wait; cancelling aborts the turn.

        `num_sampled`: what the trajectory has sampled before. Waits while paused with "keep".
        Raises TurnAborted if the trajectory was aborted before or all are ("abort"), RolloutError
        if a rank has failed.
        """
        number = request.trajectory
        while self._paused is not None:
            await self.unless_aborted(number, self._open.wait())
        if self.failure is not None:
            raise self.failure
        if number in self._aborted:
            raise TurnAborted
        if self._barrier is not None and (holds := self._barrier.holds(number, num_sampled)):
            request = msgspec.structs.replace(request, holds=holds)
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

    async def unless_aborted(self, trajectory: int, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` gives; it is cancelled, and TurnAborted raised, if the trajectory is aborted
        before it has ended. RolloutError if a rank fails meanwhile."""
        task = asyncio.ensure_future(work)
        interrupted: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._interruptible[trajectory] = interrupted
        if self.failure is not None:
            interrupted.set_result(self.failure)
        elif trajectory in self._aborted or self._paused == "abort":
            interrupted.set_result(TurnAborted())
        try:
            await asyncio.wait((task, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if task.done():  # first: what it has brought must not be lost
                return task.result()
            raise interrupted.result()
        finally:
            del self._interruptible[trajectory]
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def abort(self, trajectory: int) -> None:
        """End the trajectory at its running turn, whose partial result counts, or before its next;
        one that is not played yet before its first."""
        if trajectory in self._waiting and self.failure is None:
            leader, _ = self._waiting[trajectory]
            self._send(leader, Abort(trajectory=trajectory))
        self._aborted.add(trajectory)
        self._interrupt(trajectory, TurnAborted())

    def expect(self, trajectory: int) -> None:
        """It is going to be played; an abort that came after an earlier end of it is forgotten."""
        self._aborted.discard(trajectory)

    def ended(self, trajectory: int) -> None:
        """It is not played any more."""
        self._aborted.discard(trajectory)
        if self._barrier is not None:
            self._barrier.ended(trajectory)

    def pause(self, mode: PauseMode) -> None:
        """Start no turn until `resume`. With "keep" running ones are held, with "abort" they end
        with what they have, and so does every other trajectory that is being played."""
        self._paused = mode
        self._open.clear()
        for leader in range(self._num_leaders):
            self._send(leader, Pause(mode=mode))
        if mode == "abort":
            for trajectory in list(self._interruptible):
                self._interrupt(trajectory, TurnAborted())

    def resume(self) -> None:
        """Go on after `pause`; nothing happens if there was none."""
        if self._paused is not None:
            self._paused = None
            self._open.set()
            for leader in range(self._num_leaders):
                self._send(leader, Resume())

    async def opened(self) -> None:
        """Wait until turns may start."""
        await self._open.wait()

    def deliver(self, event: Event) -> None:
        """A result wakes its trajectory; a failure wakes all with an error."""
        match event:
            case TurnResult():
                _, future = self._waiting.get(event.trajectory, (0, None))
                if future is not None and not future.done():
                    future.set_result(event)
            case Held() if self._barrier is not None:
                self._barrier.held(event.trajectory, event.version)
            case RankFailure():
                self.failure = self.failure or RolloutError(event.text, event.diagnosis)
                for _, future in self._waiting.values():
                    if not future.done():
                        future.set_exception(self.failure)
                for trajectory in list(self._interruptible):
                    self._interrupt(trajectory, self.failure)

    def _interrupt(self, trajectory: int, error: Exception) -> None:
        interrupted = self._interruptible.get(trajectory)
        if interrupted is not None and not interrupted.done():
            interrupted.set_result(error)
