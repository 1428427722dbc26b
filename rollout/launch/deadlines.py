"""How long a rank may wait, which is longer until it has loaded and every path has run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from interlace.comm.crossing import Moments
from interlace.comm.path import Path, Ticket
from interlace.comm.progress import Progress
from interlace.rollout.config import Launch


class Deadlines:
    """Passes on what a rank tells of its progress, and sees when no forward pass is a first one.

    First ones compile, allocate and warm up. A rank that has not seen work for some path yet keeps
    the longer deadline.
    """

    def __init__(self, progress: Progress, launch: Launch) -> None:
        """Loading begins now."""
        self._launch = launch
        self._load_by = time.monotonic() + launch.load_timeout_s
        self._settled = progress.settled
        self._left: dict[str, int] | None = None
        self.computing: Callable[[Ticket], None] = progress.computing
        self.posted: Callable[[Ticket], None] = progress.posted
        self.settled: Callable[[Ticket], None] = self._count
        self._crossed = progress.crossed
        self.waiting: Callable[[str], None] = progress.waiting
        self.going_on: Callable[[], None] = progress.going_on

    def expect(self, paths: Sequence[Path]) -> None:
        """It has loaded; the first forward passes of these are counted."""
        self._left = {path.name: len(path.program) for path in paths}

    def loading_s(self) -> float:
        """What is left of the time for loading, in seconds."""
        return max(1.0, self._load_by - time.monotonic())

    def patience(self) -> float:
        """The least time, in seconds, that a wait may take now."""
        return self._launch.load_timeout_s if self._left else 0.0

    def longest_wait(self, began: float) -> float:
        """The most time, in seconds, that a wait may take that began at `began`."""
        if self._left is None:
            return self._load_by - began
        launch = self._launch
        return max(launch.ticket_timeout_s, launch.exchange_timeout_s, self.patience())

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Moments]) -> None:
        self._crossed(tickets, moments)
        self._take_off(tickets[0].path, len(tickets))

    def _count(self, ticket: Ticket) -> None:
        self._settled(ticket)
        self._take_off(ticket.path, 1)

    def _take_off(self, path: str, num: int) -> None:
        left = self._left
        if left and path in left:
            left[path] -= num
            if left[path] <= 0:
                del left[path]
            if not left:
                self.settled = self._settled
