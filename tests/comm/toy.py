"""A toy engine: two paths, a scheduler, and numbers that any mixed-up message changes. No torch.

`expected` computes the tokens of a job directly, without communication, so they may depend on
nothing but the job: neither on the mode, nor on who else is in the batch, nor on the schedule.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from interlace.comm.agreement import agree
from interlace.comm.collectives import Collective, Exchange, Forward, Gather, Park, perform
from interlace.comm.communicator import Communicator
from interlace.comm.errors import CommunicationError, DeadlockError, DivergedError, OrderError
from interlace.comm.journal import Journal
from interlace.comm.path import Path, Ticket
from interlace.comm.plan import Mode, PlanConfig, PlanState, StepPlan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer, record_program
from interlace.comm.testing import LocalWorld

PREFILL, DECODE = "prefill", "decode"
MASK = (1 << 62) - 1  # fits an int64 on the wire


def mix(*values: int) -> int:
    total = 0x9E3779B9
    for value in values:
        total = (total ^ value) * 0x5851F42D4C957F2D & MASK
        total ^= total >> 29
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Role ep spans all ranks; with tp > 1 role tp splits them into neighbours."""

    world: int
    tp: int = 1
    layers: int = 2

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        ranks = tuple(range(self.world))
        groups: dict[str, tuple[tuple[int, ...], ...]] = {"ep": (ranks,)}
        if self.tp > 1:
            groups["tp"] = tuple(ranks[at : at + self.tp] for at in range(0, self.world, self.tp))
        return groups

    @property
    def num_homes(self) -> int:
        return self.world // self.tp


async def forward(layout: Layout, rank: int, rows: Sequence[int]) -> list[int]:
    """Each row is mixed with its tp peers' views, then visits the rank that its value names."""
    values = list(rows)
    for layer in range(layout.layers):
        if layout.tp > 1:
            view = [mix(rank % layout.tp, layer, value) for value in values]
            views = await perform(Gather(role="tp", stage=f"{layer}.views", payload=view))
            values = [mix(*parts) for parts in zip(*views, strict=True)]
        order = sorted(range(len(values)), key=lambda row: values[row] % layout.world)
        homes = [values[row] % layout.world for row in order]
        send = tuple(homes.count(peer) for peer in range(layout.world))
        table = await perform(Gather(role="ep", stage=f"{layer}.counts", payload=list(send)))
        recv = tuple(counts[rank] for counts in table)
        rows_out = [values[row] for row in order]
        arrived = await perform(
            Exchange(role="ep", stage=f"{layer}.dispatch", payload=rows_out, send=send, recv=recv)
        )
        answers = [mix(rank, layer, value) for value in arrived]
        back = await perform(
            Exchange(role="ep", stage=f"{layer}.combine", payload=answers, send=recv, recv=send)
        )
        for row, value in zip(order, back, strict=True):
            values[row] = value
    return values


def through(layout: Layout, value: int) -> int:
    """What `forward` makes of one row, without communication."""
    for layer in range(layout.layers):
        if layout.tp > 1:
            value = mix(*(mix(part, layer, value) for part in range(layout.tp)))
        value = mix(value % layout.world, layer, value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: int
    home: int
    """Data-parallel group that works on it."""
    prompt: int
    """Prompt tokens to prefill."""
    new: int
    """Tokens to generate; the prefill gives the first."""
    arrives: int
    aborted_at: int | None = None


def prompt_row(job: Job, position: int) -> int:
    return mix(1, job.id, position)


def decode_row(job: Job, tokens: Sequence[int]) -> int:
    return mix(2, job.id, len(tokens), tokens[-1])


def expected(layout: Layout, job: Job) -> list[int]:
    total = 0
    for position in range(job.prompt):
        total = mix(total, through(layout, prompt_row(job, position)))
    tokens = [total]
    while len(tokens) < job.new:
        tokens.append(through(layout, decode_row(job, tokens)))
    return tokens


def random_jobs(seed: int, layout: Layout, count: int = 6, spread: int = 10) -> list[Job]:
    draw = random.Random(seed)
    return [
        Job(
            id=id,
            home=draw.randrange(layout.num_homes),
            prompt=draw.randrange(1, 9),
            new=draw.randrange(1, 6),
            arrives=draw.randrange(spread),
        )
        for id in range(count)
    ]


class ToyScheduler:
    """The jobs of one data-parallel group; replicated on its tp ranks, only the first leads.

    As in the real engine a step's results are provisional until the next exchange agrees, and
    proposals are upper bounds made on provisional state.
    """

    def __init__(self, jobs: Sequence[Job], chunk: int) -> None:
        self.chunk = chunk
        self.tokens: dict[int, list[int]] = {job.id: [] for job in jobs}
        self.future = sorted(jobs, key=lambda job: (job.arrives, job.id))
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.inflight: list[tuple[Job, int]] = []
        """Prompt positions of the prefill in flight."""
        self.decoding: list[Job] = []
        self.provisional: list[tuple[Job, int]] = []
        self.aborted: set[int] = set()
        self.num_dropped = 0
        self._totals: dict[int, int] = {job.id: 0 for job in jobs}
        self._computed: dict[int, int] = {job.id: 0 for job in jobs}
        self._waited = 0
        self._jobs = list(jobs)

    def propose(self, step: int, rank: int, leader: bool, hashes: tuple[int, ...]) -> Proposal:
        while self.future and self.future[0].arrives <= step:
            self.waiting.append(self.future.pop(0))
        for job in self._jobs:
            if job.aborted_at is not None and job.aborted_at <= step:
                self.aborted.add(job.id)
        self.waiting = [job for job in self.waiting if job.id not in self.aborted]
        waiting = sum(job.prompt - self._computed[job.id] for job in self.waiting)
        self._waited = self._waited + 1 if waiting else 0
        joins = [job for job, _ in self.provisional if job not in self.running]
        return Proposal(
            rank=rank,
            leader=leader,
            decode_rows=len(self.running) + len(joins),
            waiting_tokens=waiting,
            waiting_steps=self._waited,
            live_rows=sum(job.id not in self.aborted for job, _ in self.inflight),
            idle=not (self.waiting or self.running or self.inflight or self.provisional),
            stop=not self.future,
            hashes=hashes,
        )

    def commit(self) -> None:
        """The exchange agreed: the last step's tokens become real."""
        for job, token in self.provisional:
            if job.id not in self.aborted:
                self.tokens[job.id].append(token)
                if job not in self.running:
                    self.running.append(job)
        self.provisional = []
        self.running = [
            job
            for job in self.running
            if job.id not in self.aborted and len(self.tokens[job.id]) < job.new
        ]

    def rows(self, path: str) -> list[int]:
        """The batch of a forward pass that begins now."""
        if path == DECODE:
            self.decoding = list(self.running)
            return [decode_row(job, self.tokens[job.id]) for job in self.decoding]
        while self.waiting and len(self.inflight) < self.chunk:
            job = self.waiting.pop(0)
            first = self._computed[job.id]
            last = min(job.prompt, first + self.chunk - len(self.inflight))
            self.inflight += [(job, position) for position in range(first, last)]
        return [prompt_row(job, position) for job, position in self.inflight]

    def take(self, path: str, values: Sequence[int]) -> None:
        """The output of a forward pass that returned."""
        if path == DECODE:
            self.provisional += zip(self.decoding, values, strict=True)
            return
        rows, self.inflight = self.inflight, []
        for (job, position), value in zip(rows, values, strict=True):
            self._totals[job.id] = mix(self._totals[job.id], value)
            self._computed[job.id] = position + 1
            if position + 1 == job.prompt:
                self.provisional.append((job, self._totals[job.id]))
        for job in dict.fromkeys(job for job, _ in reversed(rows)):
            if job.id not in self.aborted and self._computed[job.id] < job.prompt:
                self.waiting.insert(0, job)

    def drop(self) -> None:
        self.num_dropped += 1
        self.inflight = []


class Recording:
    """Passes everything on and keeps the tickets in the order they were posted on this rank."""

    def __init__(self, inner: Communicator, posted: list[Ticket]) -> None:
        self.inner, self.posted, self.timeout_s = inner, posted, inner.timeout_s

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        if ticket is not None:
            self.posted.append(ticket)
        return self.inner.post(request, ticket)

    def poll(self, handle: Any) -> bool:
        return self.inner.poll(handle)

    def result(self, handle: Any) -> Any:
        return self.inner.result(handle)

    def abort(self) -> None:
        self.inner.abort()


Mutate = Callable[["Engine", StepPlan], StepPlan]


class Engine:
    """propose, agree, commit, walk; the keyword arguments at the end are for mutants."""

    def __init__(
        self,
        *,
        rank: int,
        layout: Layout,
        config: PlanConfig,
        communicators: Mapping[tuple[str, str], Communicator],
        control: Communicator,
        jobs: Sequence[Job],
        chunk: int = 4,
        sequencer: type[Sequencer] = Sequencer,
        mutate: Mutate | None = None,
        agree: Callable[..., Any] = agree,
        with_hashes: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.rank, self.layout, self.config = rank, layout, config
        self.posted: list[Ticket] = []
        self.plans: list[StepPlan] = []
        mine = [job for job in jobs if job.home == rank // layout.tp]
        self.scheduler = ToyScheduler(mine, chunk)
        self.sequencer = sequencer(
            rank=rank,
            paths=config.paths,
            communicators={key: Recording(c, self.posted) for key, c in communicators.items()},
            around=lambda path: nullcontext(),
            clock=clock or itertools.count().__next__,
            journal=Journal(),
        )
        self._control, self._mutate, self._agree = control, mutate, agree
        self._with_hashes = with_hashes

    @property
    def hashes(self) -> tuple[int, ...]:
        hashes = self.sequencer.hashes
        return hashes if self._with_hashes else (0,) * len(hashes)

    async def run(self) -> dict[int, list[int]]:
        try:
            return await self._run()
        finally:
            self.sequencer.close()

    async def _run(self) -> dict[int, list[int]]:
        state, scheduler = PlanState(), self.scheduler
        leader = self.rank % self.layout.tp == 0
        while True:
            proposal = scheduler.propose(state.step, self.rank, leader, self.hashes)
            agreement = await self._agree(
                self._control, state, proposal, self.config, self.sequencer.keys
            )
            plan = agreement.plan
            scheduler.commit()
            if plan.stop:
                return scheduler.tokens
            if plan.drop:
                scheduler.drop()
            self.plans.append(plan)
            state = plan.after
            if self._mutate is not None:
                plan = self._mutate(self, plan)
            started: dict[str, Forward] = {
                name: forward(self.layout, self.rank, scheduler.rows(name)) for name in plan.start
            }
            for name, values in (await self.sequencer.walk(plan, started)).items():
                scheduler.take(name, values)
            if plan.park_ms:
                await perform(Park(ms=plan.park_ms))


def stub_result(request: Collective, size: int) -> Any:
    """The answer of a group in which nobody has rows."""
    return [request.payload] * size if isinstance(request, Gather) else []


def paths_of(layout: Layout) -> tuple[Path, ...]:
    sizes = {role: len(groups[0]) for role, groups in layout.groups.items()}
    program = record_program(forward(layout, 0, []), sizes, stub_result)
    return tuple(
        Path(name=name, groups=layout.groups, program=program, whole=name == DECODE, work=(name,))
        for name in (DECODE, PREFILL)
    )


def config_of(layout: Layout, mode: Mode, slots: int = 2, chunk_steps: int = 3) -> PlanConfig:
    return PlanConfig(
        paths=paths_of(layout), mode=mode, slots=slots, chunk_steps=chunk_steps, start_tokens=3
    )


def split(payload: list[int], counts: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(counts))
    return [payload[end - count : end] for end, count in zip(ends, counts, strict=True)]


def concat(parts: Sequence[list[int]]) -> list[int]:
    return [value for part in parts for value in part]


def copied(part: Any) -> Any:
    return part if isinstance(part, bytes) else list(part)


def local_world(size: int, **kwargs: Any) -> LocalWorld:
    return LocalWorld(size, split=split, concat=concat, copy=copied, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A toy ready to run in a LocalWorld."""

    world: LocalWorld
    engines: list[Engine]
    layout: Layout
    jobs: list[Job]

    def run(self) -> None:
        """Run to the end; AssertionError if any number is wrong."""
        self.world.run([engine.run() for engine in self.engines])
        for engine in self.engines:
            for job in self.jobs:
                if job.home == engine.rank // self.layout.tp and job.aborted_at is None:
                    assert engine.scheduler.tokens[job.id] == expected(self.layout, job)

    def outcome(self) -> str:
        """How the run ended, in one word."""
        try:
            self.run()
        except DeadlockError:
            return "hang"
        except OrderError:
            return "refused"
        except (DivergedError, CommunicationError):
            return "diverged"
        except (AssertionError, ValueError, IndexError):
            return "wrong"  # a foreign message changed a number, or broke the arithmetic
        return "right"


def build(
    layout: Layout,
    mode: Mode = "multiplexed",
    *,
    seed: int = 0,
    jobs: list[Job] | None = None,
    slots: int = 2,
    chunk_steps: int = 3,
    wrap: Callable[[Mapping[Any, Communicator]], Mapping[Any, Communicator]] = lambda same: same,
    world: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Toy:
    """One engine a rank; `world` goes to the LocalWorld and `engine` to every Engine."""
    local = local_world(layout.world, seed=seed, slots=slots, **(world or {}))
    config = config_of(layout, mode, slots, chunk_steps)
    jobs = random_jobs(seed, layout) if jobs is None else jobs
    engines = [
        Engine(
            rank=rank,
            layout=layout,
            config=config,
            communicators=wrap(
                {
                    (path.name, role): local.communicator(
                        (path.name, role), path.group_of(role, rank), rank
                    )
                    for path in config.paths
                    for role in path.groups
                }
            ),
            control=local.communicator("control", range(layout.world), rank),
            jobs=jobs,
            **engine,
        )
        for rank in range(layout.world)
    ]
    return Toy(world=local, engines=engines, layout=layout, jobs=jobs)
