"""What is known about one rank at one moment: the material a diagnosis is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activity(StrEnum):
    """What a rank's own thread was last seen to begin."""

    ABSENT = "absent"
    """Nothing has been heard of the rank."""
    HOST = "host"
    """It runs its own code: loading, scheduling, computing."""
    WAITING = "waiting"
    """It waits for other ranks."""
    FAILED = "failed"
    """It raised."""
    LEFT = "left"
    """It ended its loop in order."""


class ProcessState(StrEnum):
    """What the operating system says about a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It is on another host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketMark:
    """One of a rank's last tickets and how far it got; a time of 0 means not yet."""

    epoch: int
    step: int
    seq: int
    comm_seq: int
    path: str
    role: str
    stage: str
    computing_at: float
    posted_at: float
    settled_at: float

    def __str__(self) -> str:
        """The words `Ticket` uses."""
        return (
            f"epoch {self.epoch} step {self.step} seq {self.seq} "
            f"{self.path}/{self.role} {self.stage}"
        )

    @property
    def reached(self) -> str:
        """computing, posted or settled."""
        if self.settled_at:
            return "settled"
        return "posted" if self.posted_at else "computing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Times are on the reader's clock, in seconds."""

    rank: int
    pid: int = 0
    host: str = ""
    activity: Activity = Activity.ABSENT
    since: float = 0.0
    """When the activity began."""
    where: str = ""
    """What it waits for, in words, or the error it raised."""
    alive_at: float = 0.0
    """When the rank's watchdog thread last ran."""
    place: str = ""
    """The innermost line of its own thread, if that has been in one activity for long."""
    places: int = 0
    """How many different lines it was seen on since the activity began."""
    process: ProcessState = ProcessState.UNKNOWN
    tickets: tuple[TicketMark, ...] = ()
    """By seq, oldest first."""

    @property
    def moved_at(self) -> float:
        """When it last did anything that is known."""
        if self.activity is not Activity.HOST:
            return self.since
        times = ((t.computing_at, t.posted_at, t.settled_at) for t in self.tickets)
        return max(self.since, max(map(max, times), default=0.0))
