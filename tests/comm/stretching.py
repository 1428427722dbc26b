"""A sequencer of one rank whose passes offer stretches, and crossings that note what is asked."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from tests.comm.toy import DECODE, PREFILL, Recording, local_world
from tests.comm.windows_in_memory import NoWaiter

from interlace.comm.collectives import Arrival, Exchange, Forward, Stretch, perform
from interlace.comm.driver import run_blocking
from interlace.comm.journal import Journal
from interlace.comm.path import Op, Path, Ticket
from interlace.comm.plan import PlanConfig, PlanState, StepPlan, plan
from interlace.comm.progress import NoProgress
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer

STAGES = ("counts", "dispatch", "combine")
PROGRAM = tuple(Op(kind="Exchange", role="ep", stage=stage) for stage in STAGES)
PATHS = tuple(
    Path(name=name, groups={"ep": ((0,),)}, program=PROGRAM, whole=name == DECODE, work=(name,))
    for name in (DECODE, PREFILL)
)
CONFIG = PlanConfig(paths=PATHS, mode="multiplexed", chunk_steps=3)
DECODES = Proposal(rank=0, leader=True, decode_rows=1)
PREFILLS = Proposal(rank=0, leader=True, waiting_tokens=1)
BOTH = replace(DECODES, waiting_tokens=1)


class Crossing:
    """Of which the nth message arrives once it has been asked for `late[nth]` times."""

    timeout_s = 5.0

    def __init__(self, rank: Rank, tickets: Sequence[Ticket]) -> None:
        self.tickets, self.at, self.num_asked = tickets, 0, 0
        self.abreast: tuple[Crossing, ...] = ()
        self.run: Any = None
        self._rank, self._moments = rank, list[tuple[float, ...]]()
        self._steps: Generator[None] | None = None
        self._began: tuple[float, float, float] = (0, 0, 0)

    def poll(self, handle: None) -> bool:
        self.num_asked += 1
        return self.num_asked > self._rank.late.get(self.at, 0)

    def result(self, handle: None) -> None: ...

    def moments(self) -> list[tuple[float, ...]]:
        return self._moments

    async def go(self, num: int | None = None) -> None:
        """What the C++ does, as far as the sequencer sees: together with those abreast."""
        self.run, together = self, self.abreast or (self,)
        first = together[0]
        while any(one.run is None for one in together):
            await perform(Arrival())
        if first._steps is None:
            first._steps = first._cross(together, num)
        for _ in first._steps:
            await perform(Arrival())

    def _cross(self, together: Sequence[Crossing], num: int | None) -> Generator[None]:
        """Stops at each wait that is not over."""
        for _ in self.tickets[:num]:
            for one in together:
                one._post()
            for one in together:
                while not one.poll(None):
                    yield
                one._settle()

    def _post(self) -> None:
        clock = self._rank.clock
        self._began = clock(), clock(), clock()
        self._rank.posted.append(self.tickets[self.at])
        self.num_asked = 0

    def _settle(self) -> None:
        settled = self._rank.clock()
        self._moments.append((*self._began, settled, settled - self._began[2]))
        self.at += 1


async def straight(
    stages: Sequence[str] = STAGES, role: str = "ep", num: int | None = None
) -> list[Any]:
    """Offers to go through all stages in one call; crosses `num` of them."""
    crossing = await perform(Stretch(stages=tuple(stages), role=role))
    if crossing is not None:
        await crossing.go(num)
        return ["straight", [f"{ticket.path} {ticket.op.stage}" for ticket in crossing.tickets]]
    return [
        await perform(Exchange(role=role, stage=stage, payload=[stage], send=(1,), recv=(1,)))
        for stage in stages
    ]


def never(seconds: float) -> None:
    raise AssertionError("nobody parks")


class Noting(NoProgress):
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def computing(self, ticket: Ticket) -> None:
        self.told.append(("computing", ticket.seq))

    def posted(self, ticket: Ticket) -> None:
        self.told.append(("posted", ticket.seq))

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Any]) -> None:
        self.told.append(("crossed", *[ticket.seq for ticket in tickets], len(moments)))


class Rank:
    """A sequencer of one rank in a world of one, what it posted, and which crossings it made."""

    def __init__(
        self, *, cross: Iterable[str] = (DECODE, PREFILL), paths: Sequence[Path] = PATHS, **how: Any
    ) -> None:
        self.world, self.posted = local_world(1), list[Ticket]()
        self.clock = itertools.count(1).__next__
        self.late: dict[int, int] = {}
        self.crossings: list[Crossing] = []
        self.among: list[Sequence[Ticket]] = []
        self.progress = Noting()
        self.sequencer = Sequencer(
            rank=0,
            paths=paths,
            communicators={
                (path.name, "ep"): Recording(
                    self.world.communicator((path.name, "ep"), (0,), 0), self.posted
                )
                for path in paths
            },
            around=lambda path: nullcontext(),
            clock=self.clock,
            journal=Journal(),
            progress=self.progress,
            crossings={(path, "ep"): self.cross for path in cross},
            **how,
        )

    def cross(self, tickets: Sequence[Ticket], among: Sequence[Ticket]) -> Any:
        assert set(tickets) <= set(among)
        self.among.append(among)
        self.crossings.append(Crossing(self, tickets))
        return self.crossings[-1]

    def walk(self, plan: StepPlan, **started: Forward) -> dict[str, Any]:
        walk = self.sequencer.walk(plan, started)
        try:
            outputs: dict[str, Any] = run_blocking(walk, park=never, waiter=NoWaiter())
        except BaseException:
            self.sequencer.close()
            raise
        return outputs

    @property
    def crossed(self) -> list[list[int]]:
        return [[ticket.seq for ticket in one.tickets] for one in self.crossings]


def made(
    proposal: Proposal = DECODES, state: PlanState | None = None, config: PlanConfig = CONFIG
) -> StepPlan:
    return plan(state or PlanState(), [proposal], config)
