"""What one seed stands for: a layout, a mode, speeds, delays, and what happens when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.comm.path import Path
from interlace.comm.plan import Mode, PlanConfig
from interlace.comm.sequencer import record_program
from interlace.moe.description import Description

from .toy_model import Strategy, ToyContext, ToyModel, ToyWeights, toy_stub

Groups = tuple[tuple[int, ...], ...]

_LAYOUTS = (
    *[(2, 1)] * 24,
    *[(2, 2)] * 6,
    *[(3, 1)] * 3,
    *[(4, 2)] * 3,
    (4, 1),
    (4, 4),
)
"""(ranks, tensor-parallel size); small ones often, since what can go wrong goes wrong there."""
_LARGE = ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (12, 2), (16, 2), (16, 4))
"""With more turns, too."""
_MULTIPLEXED: Mode = "multiplexed"
MODES: tuple[Mode, ...] = (*[_MULTIPLEXED] * 7, "whole_forward", "serial", "chunked")
STRATEGIES: tuple[Strategy, ...] = ("all_to_all", "fixed", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a trajectory, as the environment will ask for it."""

    leader: int
    trajectory: int
    at: int
    """Tick at which it is asked for; of a later turn, ticks after the turn before has ended."""
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the schedule, which is drawn from the same seed as it runs."""

    seed: int
    world: int
    tp: int
    layers: int
    mode: Mode
    strategies: tuple[Strategy, Strategy]
    """Of decode and of prefill."""
    halves: bool
    """Prefill's experts are spread over two halves of the ranks that cut across the others."""
    slots: int
    serial_slots: int
    window: bool
    """Over the shared-memory window's twin; otherwise over LocalWorld's own slots."""
    chunk_tokens: int
    chunk_steps: int
    start_tokens: int
    max_running: int
    num_blocks: int
    block_size: int
    speeds: tuple[int, ...]
    delays: tuple[int, ...]
    """Ticks a message may take; drawn anew for each. Empty: none does."""
    turns: tuple[tuple[Turn, ...], ...]
    """By trajectory."""
    aborts: tuple[tuple[int, int, int], ...]
    """(tick, leader, trajectory); some come twice, some too late."""
    updates: tuple[tuple[int, ...], ...]
    """For each version from 1 on: the tick at which each rank holds it ready."""

    @property
    def leaders(self) -> range:
        return range(0, self.world, self.tp)

    def tp_groups(self) -> Groups:
        return tuple(tuple(range(at, at + self.tp)) for at in self.leaders)

    def ep_groups(self, path: str) -> Groups:
        if path == "prefill" and self.halves:
            middle = self.tp if self.tp > 1 else 2
            return tuple(tuple(range(first, self.world, middle)) for first in range(middle))
        return (tuple(range(self.world)),)

    @property
    def works(self) -> dict[str, tuple[str, ...]]:
        """Paths in order of precedence and the work each does."""
        if self.mode == "chunked":
            return {"mixed": ("decode", "prefill")}
        return {"decode": ("decode",), "prefill": ("prefill",)}

    def strategy(self, path: str) -> Strategy:
        return self.strategies[path == "prefill"]

    def groups(self, path: str) -> dict[str, Groups]:
        groups = {"ep": self.ep_groups(path)}
        if self.tp > 1:
            groups["tp"] = self.tp_groups()
        return groups

    def plan_config(self) -> PlanConfig:
        return PlanConfig(
            paths=tuple(self._path(name, work) for name, work in self.works.items()),
            mode=self.mode,
            slots=self.slots,
            chunk_steps=self.chunk_steps,
            start_tokens=self.start_tokens,
            start_steps=2,
        )

    def _path(self, name: str, work: tuple[str, ...]) -> Path:
        groups = self.groups(name)
        context = self.context(name, 0, [[] for _ in range(self.layers)])
        forward = ToyModel(self.layers).forward(ToyWeights(), context, Description())
        sizes = {role: len(partition[0]) for role, partition in groups.items()}
        program = record_program(forward, sizes, toy_stub(context))
        return Path(name=name, groups=groups, program=program, whole="decode" in work, work=work)

    def context(self, path: str, rank: int, kv: list[list[int]], epoch: int = 0) -> ToyContext:
        """The path on a rank whose pool is `kv`."""
        ep = next(group for group in self.ep_groups(path) if rank in group)
        tp = next(group for group in self.tp_groups() if rank in group)
        return ToyContext(
            path=list(self.works).index(path),
            rank=rank,
            tp=tp,
            ep=ep,
            strategy=self.strategy(path),
            kv=kv,
            block_size=self.block_size,
            epoch=epoch,
        )


def scenario(seed: int, *, both_paths: bool = False) -> Scenario:
    """The scenario of a seed; the same on every machine. `both_paths`: one in which decode and
    prefill surely meet in some step."""
    draw = random.Random(seed)
    large = draw.random() < 0.006
    world, tp = draw.choice(_LARGE if large else _LAYOUTS)
    mode = draw.choice(MODES)
    halves = mode != "chunked" and world % 2 == 0 and world > 2 and draw.random() < 0.5
    block_size = draw.choice((2, 4))
    delays = draw.choice(((), (), (0, 0, 5), (0, 30), (3, 3, 3, 90)))
    pace = 6 * world + 2 * max((*delays, 0))
    leaders = range(0, world, tp)
    if both_paths:
        mode = _MULTIPLEXED
    burst = both_paths or (mode == "multiplexed" and draw.random() < 0.25)
    turns = _burst(draw, leaders, pace) if burst else _turns(draw, leaders, block_size, pace, large)
    aborts = _aborts_in_flight(draw, turns, pace) if burst else _aborts(draw, turns, pace)
    needs = [-(-_num_tokens(trajectory) // block_size) for trajectory in turns]
    most, total = max(needs), sum(needs)
    return Scenario(
        seed=seed,
        world=world,
        tp=tp,
        layers=2 if burst else draw.choice((1, 1, 1, 2)),
        mode=mode,
        strategies=(draw.choice(STRATEGIES), draw.choice(STRATEGIES)),
        halves=halves,
        slots=draw.choice((2, 2, 2, 3)),
        serial_slots=draw.choice((0, 0, 1, 2)),
        window=draw.random() < 0.2,
        chunk_tokens=8 if burst else draw.choice((2, 4, 4)),
        chunk_steps=6 if burst else draw.choice((1, 2, 3, 6)),
        start_tokens=1 if burst else draw.choice((1, 3)),
        max_running=4 if burst else draw.choice((1, 2, 4)),
        num_blocks=total + 6 if burst else draw.choice((most, most + 1, total)),
        block_size=block_size,
        speeds=_speeds(draw, world),
        delays=delays,
        turns=turns,
        aborts=aborts,
        updates=_updates(draw, world, pace),
    )


def _turns(
    draw: random.Random, leaders: Sequence[int], block_size: int, pace: int, large: bool
) -> tuple[tuple[Turn, ...], ...]:
    """One trajectory decodes for a while, and others come with their prompts meanwhile. A step
    takes about `pace` ticks."""
    common = tuple(draw.randrange(1, 60) for _ in range(2 * block_size))
    if draw.random() < 0.3:
        leaders = (draw.choice(leaders),)
    trajectories = []
    for trajectory in range(draw.choice((4, 6) if large else (1, 1, 2, 2, 3))):
        leader, turns = draw.choice(leaders), []
        if trajectory == 0:
            at, max_tokens = 0, draw.choice((2, 3, 4))
        else:
            at = draw.randrange(4 * pace)
            max_tokens = draw.choice((1, 1, 2))
        for nth in range(draw.choice((1, 1, 1, 1, 2))):
            own = tuple(draw.randrange(1, 60) for _ in range(draw.choice((1, 3, 6))))
            shared = common[: draw.choice((0, block_size, 2 * block_size))] if nth == 0 else ()
            turns.append(
                Turn(
                    leader=leader,
                    trajectory=trajectory,
                    at=at if nth == 0 else draw.choice((0, pace)),
                    prompt=shared + own,
                    max_tokens=max_tokens if nth == 0 else 1,
                )
            )
        trajectories.append(tuple(turns))
    return tuple(trajectories)


def _burst(draw: random.Random, leaders: Sequence[int], pace: int) -> tuple[tuple[Turn, ...], ...]:
    """Prompts that are prefilled together for several steps, while one trajectory decodes."""
    at = draw.randrange(pace, 2 * pace)
    turns = [(0, 2, 5), (at, 3, 1), (at, draw.choice((2, 4)), 1)]
    return tuple(
        (
            Turn(
                leader=draw.choice(leaders),
                trajectory=trajectory,
                at=tick,
                prompt=tuple(draw.randrange(1, 60) for _ in range(num)),
                max_tokens=max_tokens,
            ),
        )
        for trajectory, (tick, num, max_tokens) in enumerate(turns)
    )


def _num_tokens(turns: Sequence[Turn]) -> int:
    return sum(len(turn.prompt) + turn.max_tokens for turn in turns) + 1


def _speeds(draw: random.Random, world: int) -> tuple[int, ...]:
    """Swarm: in some runs all ranks are alike, in others one is hundreds of times slower."""
    most = draw.choice((1, 4, 20, 20))
    return tuple(max(1, int(most * draw.random() ** 2 + 0.5)) for _ in range(world))


def _aborts(
    draw: random.Random, turns: Sequence[Sequence[Turn]], pace: int
) -> tuple[tuple[int, int, int], ...]:
    aborts = []
    for first, *_ in turns:
        if draw.random() < 0.4:
            tick = first.at + draw.randrange(5, 3 * pace)
            for _ in range(draw.choice((1, 1, 2))):
                aborts.append((tick, first.leader, first.trajectory))
                tick += draw.randrange(pace)
    return tuple(aborts)


def _aborts_in_flight(
    draw: random.Random, turns: Sequence[Sequence[Turn]], pace: int
) -> tuple[tuple[int, int, int], ...]:
    """Of the prompts of a burst, one or both, while they are being prefilled."""
    chosen = draw.choice(([1], [2], [1, 2]))
    firsts = [turns[nth][0] for nth in chosen]
    return tuple(
        (turn.at + draw.randrange(pace // 2, 3 * pace), turn.leader, turn.trajectory)
        for turn in firsts
    )


def _updates(draw: random.Random, world: int, pace: int) -> tuple[tuple[int, ...], ...]:
    updates, tick = [], 0
    for _ in range(draw.choice((0, 0, 1, 2))):
        tick += draw.randrange(pace, 5 * pace)
        updates.append(tuple(tick + draw.choice((0, 0, 10, pace)) for _ in range(world)))
    return tuple(updates)
