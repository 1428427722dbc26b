"""Every rule of the design, broken: the shipped classes with one of them put wrong.

A mutant is a subclass or a wrapper handed in where a simulated rank is put together; the shipped
code knows nothing of it. The simulation must find each within a hundred seeds, or its seeds prove
nothing about the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from interlace.comm.collectives import Collective
from interlace.comm.communicator import Communicator
from interlace.comm.path import Ticket
from interlace.comm.plan import StepPlan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer
from interlace.moe.description import Description
from interlace.rollout.engine import Engine
from interlace.rollout.scheduler import Scheduler

from . import faults
from .properties import check
from .ranks import ToyLeader, ToyUpdates
from .scenario import scenario
from .simulation import Ends, Simulation, Wiring
from .toy_model import ToyContext, ToyModel, ToyOutput, ToyWeights

MOST_SEEDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rule of the design and a way to break it."""

    name: str
    rule: str
    """What the shipped code does instead."""
    wiring: Wiring
    where: Mapping[str, Any] = field(default_factory=dict)
    """What of a scenario is set for the rule to matter."""
    fault: str = ""
    """What must go wrong for the rule to matter; empty: nothing."""

    def attempt(self, seed: int) -> None:
        """Run one seed with the mutant in it; raises whatever finds it."""
        if self.fault:
            faults.provoke(seed, self.fault, self.wiring)
            return
        run = Simulation(replace(scenario(seed), **self.where), self.wiring)
        run.run()
        check(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Which seed found a mutant, and by what."""

    seed: int
    error: str
    """Type of the error that ended the run."""
    how: str

    @property
    def in_short(self) -> str:
        return f"{self.error}: {self.how}"[:120]


def hunt(mutant: Mutant, seeds: Sequence[int] = range(MOST_SEEDS)) -> Death | None:
    """The first of the seeds that finds the mutant; None if none does."""
    for seed in seeds:
        try:
            mutant.attempt(seed)
        except Exception as error:
            return Death(seed=seed, error=type(error).__name__, how=str(error))
    return None


# ---- order


class OwnOrder(Sequencer):
    """Odd ranks issue one path's tickets after the other's, as if each rank were free to."""

    agreed: StepPlan

    async def walk(self, plan: StepPlan, started: Mapping[str, Any]) -> dict[str, Any]:
        self.agreed = plan
        if self.rank % 2:
            seqs = [ticket.seq for ticket in plan.tickets]
            own = sorted(plan.tickets, key=lambda ticket: (ticket.path < "e", ticket.path_seq))
            tickets = tuple(replace(t, seq=seq) for t, seq in zip(own, seqs, strict=True))
            plan = replace(plan, tickets=tickets)
        return await super().walk(plan, started)

    def _note_plan(self, plan: StepPlan) -> None:
        super()._note_plan(self.agreed)


class UncheckedSeq(Sequencer):
    """Does not look whether a ticket comes after the last one."""

    def _admit(self, ticket: Ticket) -> None:
        last, self._last_seq = self._last_seq, -1
        super()._admit(ticket)
        self._last_seq = last


class UncheckedRequest(Sequencer):
    """Posts what the forward pass asks for, whatever the ticket says."""

    def _match(self, ticket: Ticket, request: Collective | None) -> Collective:
        return super()._match(ticket, request) if request is None else request


class HashPerCommunicator(Sequencer):
    """Rolls each communicator's own numbers only: blind to two paths that change places."""

    def _note(self, *tickets: Ticket) -> None:
        super()._note(*(replace(ticket, seq=0) for ticket in tickets))
        self._last_seq = tickets[-1].seq


class UnhashedPlan(Sequencer):
    """Compares tickets, not plans."""

    def _note_plan(self, plan: StepPlan) -> None: ...


# ---- isolation


def shared_state(run: Simulation, rank: int, ends: Ends) -> Ends:
    """All paths post to the communicators of the first."""
    first = run.config.paths[0].name
    return {(name, role): ends[first, role] for name, role in ends}


class SlotPerPath(Sequencer):
    """Counts slots per path, over all its communicators."""

    async def _issue(self, ticket: Ticket) -> None:
        await super()._issue(replace(ticket, slot=ticket.path_seq % 2))


class AtOnce:
    """A communicator whose results are taken whether they are there or not."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.timeout_s = inner, inner.timeout_s

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        return self.inner.post(request, ticket)

    def poll(self, handle: Any) -> bool:
        return True

    def result(self, handle: Any) -> Any:
        return self.inner.result(handle)

    def abort(self) -> None:
        self.inner.abort()


def unwaited(run: Simulation, rank: int, ends: Ends) -> Ends:
    return {key: AtOnce(end) for key, end in ends.items()}


class DropAtOnce(Sequencer):
    """A dropped path's collective is not settled; its slot serves the next."""

    async def drop(self, path: str) -> None:
        if path in self._running:
            self._outstanding.pop(path, None)
            self._ahead.pop(path, None)
            self._running.pop(path).close()


# ---- participation


class IdleSkips(Sequencer):
    """A rank without rows leaves a forward pass out."""

    idle: frozenset[str] = frozenset()

    async def walk(self, plan: StepPlan, started: Mapping[str, Any]) -> dict[str, Any]:
        rows = {
            name: inspect.getcoroutinelocals(forward)["description"].num_rows
            for name, forward in started.items()
        }
        self.idle = (self.idle - set(rows)) | {name for name, num in rows.items() if not num}
        idle = self.idle
        for name in idle & set(started):
            started[name].close()
        walked = replace(
            plan,
            start=tuple(name for name in plan.start if name not in idle),
            tickets=tuple(ticket for ticket in plan.tickets if ticket.path not in idle),
            finish=tuple(name for name in plan.finish if name not in idle),
        )
        kept = {name: forward for name, forward in started.items() if name not in idle}
        outputs = await super().walk(walked, kept)
        nothing = ToyOutput(
            tokens=[], experts_TLK=np.zeros((0, 1, 1), np.uint8), version=plan.version
        )
        return {name: outputs.get(name, nothing) for name in plan.finish}


class EarlyReturn(ToyModel):
    """No rows, nothing to do."""

    async def forward(
        self,
        weights: ToyWeights,
        context: ToyContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ToyOutput:
        if not description.num_rows:
            empty = np.zeros((0, self.layers, 1), np.uint8)
            return ToyOutput(tokens=[], experts_TLK=empty, version=weights.version)
        return await super().forward(weights, context, description, max_rows=max_rows)


class OwnCapacity(ToyModel):
    """Room for this rank's own number of rows, instead of the agreed one."""

    async def forward(
        self,
        weights: ToyWeights,
        context: ToyContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ToyOutput:
        own = description.num_rows
        return await super().forward(weights, context, description, max_rows=own)


# ---- agreement


class Deaf:
    """An end of the control group that hears only this rank's leader."""

    def __init__(self, inner: Communicator, leader: int) -> None:
        self.inner, self.timeout_s, self._leader = inner, inner.timeout_s, leader

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        return self.inner.post(request, ticket)

    def poll(self, handle: Any) -> bool:
        return self.inner.poll(handle)

    def result(self, handle: Any) -> Any:
        answers = self.inner.result(handle)
        return [answers[self._leader]] * len(answers)

    def abort(self) -> None:
        self.inner.abort()


def own_plan(run: Simulation, rank: int, end: Communicator) -> Communicator:
    return Deaf(end, rank - rank % run.scenario.tp)


class Hasty(Deaf):
    """Tells that every rank holds the version that any holds."""

    def result(self, handle: Any) -> Any:
        proposals = [Proposal.unpack(bytes(data)) for data in self.inner.result(handle)]
        newest = max(proposal.update for proposal in proposals)
        return [replace(proposal, update=newest).pack() for proposal in proposals]


def first_to_be_ready(run: Simulation, rank: int, end: Communicator) -> Communicator:
    return Hasty(end, rank)


class CommitsEarly(ToyLeader):
    """What a step produced is told before the others have confirmed it."""

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        for result in self.scheduler.commit():
            self._emit(result)
        return super().propose(rank, hashes)


class StopsWhenIdle(ToyLeader):
    """Nothing to do is taken for the end."""

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        proposal = super().propose(rank, hashes)
        return replace(proposal, stop=proposal.idle)


class ProposesTooLittle(ToyLeader):
    """Leaves out those whose first token is not confirmed: no upper bound."""

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        proposal = super().propose(rank, hashes)
        joining = len(self.scheduler._joining)
        return replace(proposal, decode_rows=proposal.decode_rows - joining)


class LocalAbort(Engine):
    """A leader one of whose rows is aborted drops its prefill by itself."""

    async def step(self) -> bool:
        scheduler = getattr(self.part, "scheduler", None)
        flight = () if scheduler is None else scheduler._flights.get("prefill", ())
        if any(rows.sequence.aborted for rows in flight):
            await self._sequencer.drop("prefill")
        return await super().step()


# ---- updates and memory


class Undrained(ToyUpdates):
    """A version is used as soon as this rank holds it."""

    def ready(self) -> int:
        self._weights.version = max(self._weights.version, self.newest)
        return 0


class NoUpdates(ToyUpdates):
    def ready(self) -> int:
        return 0


class CrossesVersions(Engine):
    """All ranks change versions at the same step, but prefill in flight goes on."""

    async def step(self) -> bool:
        if self.state.step % 3 == 2:
            version = self.state.version + 1
            cast(ToyWeights, self._weights).version = version
            self.state = replace(self.state, version=version)
        return await super().step()


class FreesInFlight(Scheduler):
    """An aborted sequence's blocks are given back although its rows are still being computed."""

    def abort(self, trajectory: int) -> None:
        super().abort(trajectory)
        for rows in self._flights.get("prefill", ()):
            sequence = rows.sequence
            if sequence.aborted and sequence.lease is not None:
                self.blocks.discard(sequence.lease)
                sequence.lease = None


def _slots(num: int) -> Callable[[Any], Any]:
    return lambda config: replace(config, slots=num)


def _one_step(config: Any) -> Any:
    return replace(config, chunk_steps=1)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="own order",
        rule="every rank issues the tickets in the agreed order",
        wiring=Wiring(sequencer=OwnOrder),
    ),
    Mutant(
        name="seq not checked",
        rule="the executor refuses a seq that does not increase",
        wiring=Wiring(sequencer=UncheckedSeq),
        fault="an old ticket",
    ),
    Mutant(
        name="request not checked",
        rule="the executor refuses a request that is not its ticket's",
        wiring=Wiring(sequencer=UncheckedRequest),
        fault="another collective",
    ),
    Mutant(
        name="hash per communicator",
        rule="the rolling hashes hold the global seq",
        wiring=Wiring(sequencer=HashPerCommunicator),
        fault="two tickets swapped",
    ),
    Mutant(
        name="plan not hashed",
        rule="the crc of every plan rides in the next exchange",
        wiring=Wiring(sequencer=UnhashedPlan),
        fault="another plan",
    ),
    Mutant(
        name="shared state",
        rule="paths own their communicators",
        wiring=Wiring(communicators=shared_state),
    ),
    Mutant(
        name="shared state, no headers",
        rule="the receiver checks headers; what it cannot see is wrong data",
        wiring=Wiring(communicators=shared_state, verify=False),
        where={"window": False},
    ),
    Mutant(name="one slot", rule="two slots or more", wiring=Wiring(config=_slots(1))),
    Mutant(
        name="slot per path",
        rule="slots are counted per communicator",
        wiring=Wiring(sequencer=SlotPerPath),
        # where the experts' groups span the others', they wait for one another anyhow
        where={"slots": 2, "strategies": ("all_to_all", "all_to_all"), "halves": True},
    ),
    Mutant(
        name="result not waited for",
        rule="a result is taken when everybody has posted",
        wiring=Wiring(communicators=unwaited),
        where={"window": True},
    ),
    Mutant(
        name="dropped slots reused",
        rule="a dropped path's collective is settled first",
        wiring=Wiring(sequencer=DropAtOnce),
    ),
    Mutant(
        name="idle rank skips",
        rule="a rank without rows runs the empty path",
        wiring=Wiring(sequencer=IdleSkips),
    ),
    Mutant(
        name="early return",
        rule="no early return on zero rows",
        wiring=Wiring(model=EarlyReturn),
    ),
    Mutant(
        name="capacity of its own",
        rule="capacity is an agreed number",
        wiring=Wiring(model=OwnCapacity),
    ),
    Mutant(
        name="plan of its own",
        rule="plans are made of all ranks' proposals",
        wiring=Wiring(control=own_plan),
    ),
    Mutant(
        name="no upper bound",
        rule="proposals are upper bounds",
        wiring=Wiring(leader=ProposesTooLittle),
    ),
    Mutant(
        name="commit before agreement",
        rule="results are provisional until the next exchange agrees",
        wiring=Wiring(leader=CommitsEarly),
    ),
    Mutant(
        name="idle means stop",
        rule="stop is a flag of its own, never deduced",
        wiring=Wiring(leader=StopsWhenIdle),
    ),
    Mutant(
        name="local abort",
        rule="a prefill is dropped by all ranks in one step",
        wiring=Wiring(engine=LocalAbort),
    ),
    Mutant(
        name="blocks of a flight freed",
        rule="blocks of a prefill in flight are kept until it returns",
        wiring=Wiring(scheduler=FreesInFlight),
    ),
    Mutant(
        name="update not agreed",
        rule="versions change at an agreed step",
        wiring=Wiring(updates=Undrained),
    ),
    Mutant(
        name="first holder decides",
        rule="an update waits until every rank holds it",
        wiring=Wiring(control=first_to_be_ready),
    ),
    Mutant(
        name="prefill crosses versions",
        rule="the deciding step drains all prefill",
        wiring=Wiring(engine=CrossesVersions, updates=NoUpdates),
    ),
    Mutant(
        name="unbounded bypass",
        rule="at most q prefill boundaries while anybody decodes",
        wiring=Wiring(config=_one_step),
    ),
    Mutant(
        name="dead epoch accepted",
        rule="the receiver checks the epoch",
        wiring=Wiring(any_epoch=True),
        fault="messages of a dead epoch",
    ),
)
