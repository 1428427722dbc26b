"""What one rank did, ticket by ticket: the raw material of traces, summaries and post-mortems.

Times are seconds of the clock handed to the sequencer (on one host: the same monotonic clock for
every rank). The journal keeps everything or, with a bound, the last `limit` tickets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, overload

from .crossing import Moments
from .path import Ticket


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


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class StepRecord:
    """One step of one rank; agreed numbers are the same on every rank. Written once."""

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


class Begun(NamedTuple):
    """The beginning of the computation up to a ticket."""

    resumed_at: float
    pauses: tuple[tuple[float, float], ...] = ()


class _MadeWhenRead(Sequence[TicketRecord]):
    """Records that can be gone through, and so can be had by their place."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> TicketRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TicketRecord]: ...
    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class Crossed(_MadeWhenRead):
    """Records of tickets that were crossed in one call, made when somebody reads them."""

    __slots__ = ("_begun", "_members", "_moments", "_tickets")

    def __init__(
        self,
        tickets: Sequence[Ticket],
        moments: Sequence[Moments],
        *,
        members: Mapping[str, tuple[int, ...]],
        begun: Mapping[str, Begun],
    ) -> None:
        """`moments`: of each ticket. `members`: of each path's communicator. `begun`: how the
        computation up to each path's first ticket began."""
        self._tickets, self._moments = tickets, moments
        self._members, self._begun = members, begun

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[TicketRecord]:
        first = dict(self._begun)
        for ticket, moments in zip(self._tickets, self._moments, strict=True):
            resumed_at, computed_at, posted_at, settled_at, waited_s = moments
            begun = first.pop(ticket.path, None)
            yield TicketRecord(
                step=ticket.step,
                seq=ticket.seq,
                path=ticket.path,
                role=ticket.op.role,
                stage=ticket.op.stage,
                comm_seq=ticket.comm_seq,
                members=self._members[ticket.path],
                resumed_at=resumed_at if begun is None else begun.resumed_at,
                computed_at=computed_at,
                posted_at=posted_at,
                settled_at=settled_at,
                waited_s=waited_s,
                pauses=() if begun is None else begun.pauses,
            )


class TicketRecords(_MadeWhenRead):
    """The last `limit` of those that were put in, or all."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pieces: deque[Sequence[TicketRecord]] = deque()
        self._num = 0

    def append(self, record: TicketRecord) -> None:
        self.extend((record,))

    def extend(self, records: Sequence[TicketRecord]) -> None:
        """Not read before somebody asks for them."""
        pieces = self._pieces
        pieces.append(records)
        self._num += len(records)
        if self._limit is not None:
            while pieces and self._num - len(pieces[0]) >= self._limit:
                self._num -= len(pieces.popleft())

    def clear(self) -> None:
        self._pieces.clear()
        self._num = 0

    def __len__(self) -> int:
        return self._num if self._limit is None else min(self._num, self._limit)

    def __iter__(self) -> Iterator[TicketRecord]:
        return islice(chain.from_iterable(self._pieces), self._num - len(self), None)


class Journal:
    """Appends records; `tail` is what an error quotes."""

    def __init__(self, limit: int | None = None) -> None:
        self.tickets = TicketRecords(limit)
        self.steps: deque[StepRecord] = deque(maxlen=limit)

    def tail(self, count: int = 8) -> str:
        """The last tickets in words, oldest first."""
        last = list(self.tickets)[-count:]
        return "; ".join(f"{t.seq} {t.path}/{t.role} {t.stage}" for t in last) or "no ticket yet"
