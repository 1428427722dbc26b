"""What went wrong on which rank: data that ranks hand to one another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from .rank_status import ProcessState, TicketMark


class Verdict(StrEnum):
    """What a rank is to a failure. The first six are causes, the last two are not."""

    DEAD = "DEAD"
    """Its process has ended without a last word."""
    RAISED = "RAISED"
    """Its own code raised."""
    DIVERGED = "DIVERGED"
    """It issued, or was about to issue, another op than the ranks had agreed on."""
    BLOCKED = "BLOCKED"
    """It stands still in its own code: stopped, asleep, or on the same lines all the time."""
    SLOW = "SLOW"
    """It moves, but did not arrive within the deadline."""
    MISSING = "MISSING"
    """It does not take part: never appeared, left in order, or waits for something else."""
    WAITING = "WAITING"
    """It waits for others."""
    RUNNING = "RUNNING"
    """It computes, and nobody has waited too long for it."""

    @property
    def is_cause(self) -> bool:
        return self not in (Verdict.WAITING, Verdict.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDiagnosis:
    """One rank's part in a failure."""

    rank: int
    verdict: Verdict
    what: str
    """What it was last seen to do, in words."""
    pid: int
    host: str
    process: ProcessState
    responsive: bool
    """Its watchdog ran, so it raises this diagnosis itself."""
    tickets: tuple[TicketMark, ...]
    """Its last ones, oldest first; times on the clock of the rank that diagnosed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What went wrong; every responsive rank raises the same one."""

    by: int
    """The rank that noticed first."""
    at: float
    """When, on that rank's clock."""
    deadline_s: float
    """How long something was waited for; 0 if the cause showed before any deadline."""
    text: str
    """All of it as one line."""
    ranks: tuple[RankDiagnosis, ...]

    @property
    def causes(self) -> tuple[RankDiagnosis, ...]:
        return tuple(rank for rank in self.ranks if rank.verdict.is_cause)

    @property
    def speaker(self) -> int:
        """The rank that tells everybody else: the first that can."""
        return next((rank.rank for rank in self.ranks if rank.responsive), self.by)

    def encode(self) -> bytes:
        """Bytes that `decode` understands on any rank."""
        return json.dumps(asdict(self)).encode()


def decode(data: bytes) -> Diagnosis:
    """The diagnosis that was encoded."""
    fields = json.loads(data)
    ranks = []
    for rank in fields["ranks"]:
        rank["verdict"], rank["process"] = Verdict(rank["verdict"]), ProcessState(rank["process"])
        rank["tickets"] = tuple(TicketMark(**ticket) for ticket in rank["tickets"])
        ranks.append(RankDiagnosis(**rank))
    return Diagnosis(**{**fields, "ranks": tuple(ranks)})
