"""The parts of a simulated rank: the shipped ones wherever they do not compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from interlace.comm.path import Path, Ticket
from interlace.comm.plan import StepPlan
from interlace.comm.progress import NoProgress
from interlace.comm.proposal import Proposal
from interlace.moe.weights import Weights
from interlace.rollout.changed import Changed
from interlace.rollout.group import Follower, Leader
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Event, TurnResult, UpdateMode
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn

from .toy_model import ToyOutput, ToyWeights
from .violation import Violation

OnTicket = Callable[[int, Ticket], None]
"""Told the rank and the ticket."""

MODES: tuple[UpdateMode, ...] = ("retract", "keep", "retract", "same")
"""Of the versions, by turns. Nobody is aborted: that is a tick's business."""

MOST_STEPS = 1000
"""No scenario needs nearly so many; one that does not end by then never will."""


@dataclass(slots=True)
class Book:
    """What the ranks did, kept outside of them."""

    num_ranks: int
    tickets: list[list[tuple[Any, ...]]] = field(init=False)
    """By rank, in the order they were posted."""
    plans: list[list[StepPlan]] = field(init=False)
    """By rank."""
    proposed: list[int] = field(init=False)
    """Exchanges each rank has entered."""
    installed: list[list[tuple[int, int]]] = field(init=False)
    """By rank: (step, version)."""
    results: list[TurnResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = range(self.num_ranks)
        self.tickets = [[] for _ in ranks]
        self.plans = [[] for _ in ranks]
        self.installed = [[] for _ in ranks]
        self.proposed = [0] * self.num_ranks

    def enter(self, rank: int) -> None:
        """The rank begins a step."""
        self.proposed[rank] += 1
        if self.proposed[rank] > MOST_STEPS:
            raise Violation(f"no end within {MOST_STEPS} steps; {len(self.results)} turns ended")


class Watch(NoProgress):
    """Writes down every ticket a rank posts, and may make something happen before or after one."""

    def __init__(
        self, book: Book, rank: int, on_ticket: OnTicket | None, on_posted: OnTicket | None
    ) -> None:
        self._tickets = book.tickets[rank]
        self._rank, self._on_ticket, self._on_posted = rank, on_ticket, on_posted

    def computing(self, ticket: Ticket) -> None:
        if self._on_ticket is not None:
            self._on_ticket(self._rank, ticket)

    def posted(self, ticket: Ticket) -> None:
        op = ticket.op
        self._tickets.append(
            (ticket.step, ticket.seq, ticket.path, op.role, op.stage, ticket.comm_seq)
        )
        if self._on_posted is not None:
            self._on_posted(self._rank, ticket)


class ToyLeader(Leader):
    """The shipped leader, whose scheduler is the shipped one; only sampling is the toy's."""

    def __init__(
        self,
        *,
        book: Book,
        rank: int,
        paths: Mapping[str, Path],
        scheduler: Scheduler,
        inbox: Inbox,
        emit: Callable[[Event], None],
        followers: Any,
    ) -> None:
        super().__init__(
            paths=paths,
            scheduler=scheduler,
            inbox=inbox,
            emit=self._agreed,
            followers=followers,
        )
        self._book, self._rank, self._tell = book, rank, emit
        self._completed_in = 0
        """The exchange before the forward pass that returned last."""

    def _agreed(self, event: Event) -> None:
        """Results leave only once every rank has entered the exchange that covers them."""
        if min(self._book.proposed) <= self._completed_in:
            raise Violation(f"rank {self._rank}: a result leaves before all ranks have agreed")
        self._tell(event)

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        self._book.enter(self._rank)
        return super().propose(rank, hashes)

    def commit(self, plan: StepPlan) -> None:
        self._book.plans[self._rank].append(plan)
        super().commit(plan)

    def complete(self, path: str, output: Any, version: int) -> None:
        found: ToyOutput = output
        check_version(self._rank, path, found, version)
        self._completed_in = self._book.proposed[self._rank]
        first_row = first_sample = 0
        for kind in self._paths[path].work:
            num_rows = self.scheduler.num_rows(kind)
            sampling = self.scheduler.sampling_rows(kind)
            num = len(sampling)
            if any(sequence.lease is None for sequence in sampling):
                raise Violation(f"rank {self._rank}: blocks were given back while in use")
            drawn = [
                Drawn(token=token, logprob_raw=0.0, logprob=0.0, ends_choice=False)
                for token in found.tokens[first_sample : first_sample + num]
            ]
            experts = found.experts_TLK[first_row : first_row + num_rows]
            self.scheduler.take(kind, drawn, experts, version)
            first_sample += num
            first_row += num_rows


class ToyFollower(Follower):
    """The shipped follower, watched."""

    def __init__(self, *, book: Book, rank: int, leader: Any) -> None:
        super().__init__(leader)
        self._book, self._rank = book, rank

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        self._book.enter(self._rank)
        return super().propose(rank, hashes)

    def commit(self, plan: StepPlan) -> None:
        self._book.plans[self._rank].append(plan)
        super().commit(plan)

    def complete(self, path: str, output: Any, version: int) -> None:
        check_version(self._rank, path, output, version)


class ToyUpdates:
    """Weight versions that become ready at any time, on each rank at its own."""

    def __init__(self, book: Book, rank: int, weights: ToyWeights) -> None:
        self.newest = 0
        self._book, self._rank, self._weights = book, rank, weights

    def ready(self) -> int:
        return self.newest

    def mode_of(self, version: int) -> UpdateMode:
        return MODES[version % len(MODES)]

    def installed(self, version: int, *, step: int, stall_s: float, changed: Changed) -> None:
        pass

    def install(self, version: int) -> Weights:
        if version > self.newest:
            raise Violation(f"rank {self._rank} is to install version {version}, not yet there")
        if version <= self._weights.version:
            raise Violation(
                f"rank {self._rank}: version {self._weights.version} is followed by {version}"
            )
        self._weights.version = version
        step = len(self._book.plans[self._rank]) - 1
        self._book.installed[self._rank].append((step, version))
        return cast(Weights, self._weights)


def check_version(rank: int, path: str, output: ToyOutput, version: int) -> None:
    if output.version != version:
        raise Violation(
            f"rank {rank}: {path} ran under version {output.version}, its plan says {version}"
        )
