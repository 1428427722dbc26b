"""The trajectories of one call of `Rollout.run`, as they finish."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from .trajectory import Trajectory


class Run:
    """Iterate it, with ``for`` or ``async for``, once. Finished trajectories wait in a queue.

    Raises what made the run fail (RolloutError, RewardError), once, in place of the next one.
    """

    def __init__(self, total: int, taken: Callable[[], None]) -> None:
        """`taken` is told about every trajectory the caller has received."""
        self.total = total
        self._taken = taken
        self._finished: queue.SimpleQueue[Trajectory | BaseException] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self.total

    def put(self, item: Trajectory | BaseException) -> None:
        """From the collector: one more is finished, or the run has failed."""
        self._finished.put(item)

    def __iter__(self) -> Iterator[Trajectory]:
        for _ in range(self.total):
            yield self._open(self._finished.get())

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        for _ in range(self.total):
            yield self._open(await asyncio.to_thread(self._finished.get))

    def _open(self, item: Trajectory | BaseException) -> Trajectory:
        if isinstance(item, BaseException):
            raise item
        self._taken()
        return item
