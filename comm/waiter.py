"""How a rank lets go of its core while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Waiter(Protocol):
    """One per rank, for all its communicators. Never a pure spin."""

    def begin(self) -> None:
        """A wait begins; calls of `arm` and `wait` follow in turn."""
        ...

    def arm(self) -> None:
        """Note what has arrived so far; polling comes after it, so that nothing slips between."""
        ...

    def wait(self, seconds: float) -> None:
        """Return once anything may have arrived since `arm`, after `seconds` at the latest."""
        ...


class RankWaiter(Waiter, Protocol):
    """A rank's own, which it rests on too while it has no work."""

    def rest(self, seconds: float, is_ready: Callable[[], bool]) -> None:
        """Sleep, at most so long, until `rouse` is called, or another rank waits for this one where
        the transport tells; not at all if it `is_ready` or was roused or waited for since `arm`."""
        ...

    def rouse(self) -> None:
        """From any thread, once what `is_ready` looks at has changed."""
        ...


class SleepWaiter:
    """For transports that cannot wake anybody: short sleeps, longer ones later.

    On a CPU the transport's own threads need the core that a spinning rank would hold.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._naps = 0
        self._roused = threading.Event()

    def begin(self) -> None:
        self._naps = 0

    def arm(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self._naps += 1
        self._sleep(min(seconds, 2e-5 if self._naps < 200 else 5e-4))

    def rest(self, seconds: float, is_ready: Callable[[], bool]) -> None:
        if not is_ready():
            self._roused.wait(seconds)
        self._roused.clear()

    def rouse(self) -> None:
        self._roused.set()
