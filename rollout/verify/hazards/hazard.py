"""One public bug in miniature, and how its two ways end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.comm.errors import (
    BufferInFlightError,
    CollectiveTimeoutError,
    CommunicationError,
    DeadlockError,
    DivergedError,
    OrderError,
    PeerLostError,
)

Kind = Literal[
    "right",
    "hang",
    "wrong data",
    "divergence detected",
    "refused",
    "timeout",
    "killed by the transport",
    "peer lost",
    "starvation",
    "livelock",
    "error",
]
How = Literal["in process", "serial device", "window", "threads", "gloo processes", "unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended, and one line that shows it."""

    kind: Kind
    evidence: str


class WrongDataError(Exception):
    """A case came to its end with a number that is not what it should be."""


class StarvationError(Exception):
    """Somebody waits for longer than the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one forked rank ended."""

    status: int
    """Exit status as subprocess reports it: negative for a signal."""
    said: str
    """What the program returned on this rank; empty if it did not return."""
    stderr: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A case that needs real ranks: `program` runs in each, `judge` sees how all of them ended.

    `program` is a function at the top of a module of this package, called with this rank, the
    number of ranks and an empty folder they share; it returns one line. The ranks are forked
    from a server that has torch imported and no process group: whatever happens to a rank stays
    in its case.
    """

    program: Callable[[int, int, str], str]
    judge: Callable[[Sequence[RankEnd]], Outcome]
    ranks: int = 2
    deadline_s: float = 20.0
    """Ranks that are still there by then are killed; a case that hangs says so itself, sooner."""


Case = Callable[[], Outcome] | Processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A row of the catalogue that a CPU can show."""

    row: int
    url: str
    """The public issue or pull request; the first, where a row names several."""
    title: str
    how: How
    expected: Kind
    """How the unsafe way ends."""
    unsafe: Case
    """The root cause in miniature; must end as expected."""
    ours: Case
    """The same situation under the shipped code; must end right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotShown:
    """A row of the catalogue that has no case here."""

    row: int
    url: str
    title: str
    why: str


def outcome_of(run: Callable[[], str]) -> Outcome:
    """Run a case in this process; what it returns is the evidence that all went right."""
    try:
        return Outcome(kind="right", evidence=run())
    except Exception as error:
        return Outcome(kind=_kind(error), evidence=f"{type(error).__name__}: {error}")


def _kind(error: Exception) -> Kind:
    kinds: list[tuple[type[Exception], Kind]] = [
        (DeadlockError, "hang"),
        (OrderError, "refused"),
        (BufferInFlightError, "refused"),
        (DivergedError, "divergence detected"),
        (CollectiveTimeoutError, "timeout"),
        (PeerLostError, "peer lost"),
        (CommunicationError, "error"),
        (WrongDataError, "wrong data"),
        (StarvationError, "starvation"),
    ]
    return next((kind for known, kind in kinds if isinstance(error, known)), "error")
