"""Waiting over windows: one doorbell a rank, for all its communicators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from .window_reference import heard, ring


class Doorbell(Protocol):
    """A rank's own doorbell: the C++, or `ReferenceDoorbell`."""

    def heard(self) -> int: ...

    def wait(self, heard: int, until_ns: int, spin_ns: int, /) -> None:
        """Until it has rung since `heard`, or until then: a short spin first, then asleep."""
        ...

    def ring(self) -> None:
        """As others do when they post. From any thread; nothing happens once it is closed."""
        ...

    def close(self) -> None: ...


class ReferenceDoorbell:
    """The twin in plain Python, which sleeps in short naps instead."""

    def __init__(self, memory: Any, nap: Callable[[], None] = lambda: time.sleep(5e-5)) -> None:
        self._bell, self._nap = memoryview(memory).cast("B").cast("I"), nap
        self._closed = False

    def heard(self) -> int:
        return heard(self._bell)

    def wait(self, heard_before: int, until_ns: int, spin_ns: int, /) -> None:
        while self.heard() == heard_before and time.monotonic_ns() < until_ns:
            self._nap()

    def ring(self) -> None:
        if not self._closed:
            ring(self._bell)

    def close(self) -> None:
        self._closed = True
        self._bell.release()


class DoorbellWaiter:
    """Wakes when anything was posted to this rank, or when a message becomes visible."""

    def __init__(
        self,
        doorbell: Doorbell,
        *,
        spin_ns: int,
        wake_on_time: Callable[[], None] = lambda: None,
    ) -> None:
        """`spin_ns`: how long a wait looks before it sleeps, which saves a short one two system
        calls. `wake_on_time` makes the sleeps of the calling thread end in time."""
        self._doorbell, self._spin_ns = doorbell, spin_ns
        self._wake_on_time: Callable[[], None] | None = wake_on_time
        self._heard = 0
        self._due_ns: int | None = None

    def begin(self) -> None:
        if self._wake_on_time is not None:
            self._wake_on_time()  # in the thread that waits
            self._wake_on_time = None

    def arm(self) -> None:
        self._heard, self._due_ns = self._doorbell.heard(), None

    def due(self, at_ns: int) -> None:
        if self._due_ns is None or at_ns < self._due_ns:
            self._due_ns = at_ns

    def wait(self, seconds: float) -> None:
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        if self._due_ns is None:
            self._doorbell.wait(self._heard, until_ns, self._spin_ns)
        else:
            # What is on its way comes no sooner: nothing to look for until then.
            self._doorbell.wait(self._heard, min(until_ns, self._due_ns), 0)

    def rest(self, seconds: float, is_ready: Callable[[], bool]) -> None:
        if not is_ready():
            self._doorbell.wait(self._heard, time.monotonic_ns() + int(seconds * 1e9), 0)

    def rouse(self) -> None:
        self._doorbell.ring()
