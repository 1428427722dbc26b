"""What one rank did, ticket by ticket: the raw material of traces, summaries and post-mortems.

Times are seconds of the clock handed to the sequencer (on one host: the same monotonic clock for
every rank). The journal keeps everything or, with a bound, the last `limit` tickets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class TicketRecord:
    """One collective of one path on one rank. Written once; frozen it would be made four times as
    slowly, between two computations."""

    step: int
    seq: int
    """Global position in the agreed order; the same on every rank."""
    path: str
    role: str
    stage: str
    comm_seq: int
    members: tuple[int, ...]
    """Ranks that take part."""
    resumed_at: float
    """The path's computation up to this collective began."""
    computed_at: float
    """The computation ended; it may have been done early, while another path had to wait."""
    posted_at: float
    """The collective was posted, at its place in the order."""
    settled_at: float
    """The result was there and the path took it."""
    waited_s: float
    """Of the time between posted and settled, what this rank spent waiting and doing nothing."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Between resumed and computed: when the path stood aside and others went first."""

    @property
    def computing(self) -> tuple[tuple[float, float], ...]:
        """When the path computed up to this collective: beginnings and ends."""
        bounds = (self.resumed_at, *chain.from_iterable(self.pauses), self.computed_at)
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank; agreed numbers are the same on every rank."""

    step: int
    version: int
    began_at: float
    ended_at: float
    decoding: int
    """Agreed: the largest number of decode rows any rank proposed (0: nobody decodes)."""
    started: tuple[str, ...]
    """Agreed: paths whose forward pass began in this step."""
    finished: tuple[str, ...]
    """Agreed: paths whose forward pass returned in this step."""
    rows: tuple[tuple[str, int], ...]
    """This rank's rows in each path that began in this step."""
    num_tickets: tuple[tuple[str, int], ...]
    """Agreed: tickets of each path in this step."""
    control_bytes: int
    """Bytes this rank sent over the control group for this step."""
    waited_s: float
    """Seconds this rank spent waiting (exchange, collectives, parked) and not computing."""
    parked_ms: int
    sampled: tuple[int, ...] = ()
    """Trajectories of this rank that were given a token by the end of this step."""
    preempted: int = 0
    """Sequences of this rank that gave their blocks back in this step."""
    recomputed: int = 0
    """Rows prefilled in it of tokens that their trajectory had forwarded before."""
    kv_bytes: int = 0
    """Keys and values this rank sent to others in it."""


class Journal:
    """Appends records; `tail` is what an error quotes."""

    def __init__(self, limit: int | None = None) -> None:
        self.tickets: deque[TicketRecord] = deque(maxlen=limit)
        self.steps: deque[StepRecord] = deque(maxlen=limit)

    def tail(self, count: int = 8) -> str:
        """The last tickets in words, oldest first."""
        last = list(self.tickets)[-count:]
        return "; ".join(f"{t.seq} {t.path}/{t.role} {t.stage}" for t in last) or "no ticket yet"
