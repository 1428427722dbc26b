"""Turns asked of the ranks, as futures of the collector's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .messages import Abort, Command, Event, RankFailure, TurnRequest, TurnResult


class RolloutError(RuntimeError):
    """A rank failed; every trajectory it was working on is lost with it."""


class Turns:
    """One outstanding turn per trajectory. Lives in the event loop; `deliver` is called there."""

    def __init__(self, send: Callable[[int, Command], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[TurnResult]] = {}
        self._failure: RolloutError | None = None

    async def generate(self, leader: int, request: TurnRequest) -> TurnResult:
        """Ask and wait. Cancelling aborts the turn. RolloutError if a rank has failed."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.trajectory] = future
        try:
            self._send(leader, request)
            return await future
        except asyncio.CancelledError:
            self._send(leader, Abort(trajectory=request.trajectory))
            raise
        finally:
            del self._waiting[request.trajectory]

    def deliver(self, event: Event) -> None:
        """A result wakes its trajectory; a failure wakes all with an error."""
        match event:
            case TurnResult():
                future = self._waiting.get(event.trajectory)
                if future is not None and not future.done():
                    future.set_result(event)
            case RankFailure():
                self._failure = self._failure or RolloutError(f"rank {event.rank}: {event.error}")
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(self._failure)
