"""Time that passes only when told to: one tick for everything that happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Counts ticks, and does what was put off until its tick has come. Called, it says the time."""

    def __init__(self) -> None:
        self.now = 0
        self._due: list[tuple[int, int, Callable[[], None] | None]] = []
        self._num_put = 0

    def __call__(self) -> int:
        return self.now

    def at(self, tick: int, action: Callable[[], None] | None = None) -> None:
        """Do this at `tick`, or soon after; without an action there is merely something to see."""
        heapq.heappush(self._due, (tick, self._num_put, action))
        self._num_put += 1

    def tick(self) -> bool:
        """One tick on; whether anything was due."""
        self.now += 1
        return self._catch_up()

    def jump(self) -> bool:
        """On to the next thing that was put off; False if there is none."""
        if not self._due:
            return False
        self.now = max(self.now, self._due[0][0])
        return self._catch_up()

    def _catch_up(self) -> bool:
        due, stirred = self._due, False
        while due and due[0][0] <= self.now:
            _, _, action = heapq.heappop(due)
            stirred = True
            if action is not None:
                action()
        return stirred
