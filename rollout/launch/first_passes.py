"""Longer deadlines until every path has run once: first steps compile, allocate and warm up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interlace.comm.path import Path, Ticket
from interlace.comm.progress import Progress


class FirstPasses:
    """Passes on what a rank tells of its progress, and sees when no forward pass is a first one.

    A rank that has not seen work for some path yet keeps the longer deadline.
    """

    def __init__(self, progress: Progress, timeout_s: float) -> None:
        """`timeout_s`: how long a wait may take meanwhile."""
        self._timeout_s = timeout_s
        self._settled = progress.settled
        self._left: dict[str, int] | None = None
        self.computing: Callable[[Ticket], None] = progress.computing
        self.posted: Callable[[Ticket], None] = progress.posted
        self.settled: Callable[[Ticket], None] = self._count
        self.waiting: Callable[[str], None] = progress.waiting
        self.going_on: Callable[[], None] = progress.going_on

    def expect(self, paths: Sequence[Path]) -> None:
        """The paths whose first forward passes are counted."""
        self._left = {path.name: len(path.program) for path in paths}

    def patience(self) -> float:
        """The least time, in seconds, that a wait may take now."""
        return self._timeout_s if self._left is None or self._left else 0.0

    def _count(self, ticket: Ticket) -> None:
        self._settled(ticket)
        left = self._left
        if left and ticket.path in left:
            left[ticket.path] -= 1
            if not left[ticket.path]:
                del left[ticket.path]
            if not left:
                self.settled = self._settled
