"""A whole rollout in miniature: the shipped engine, scheduler, plan and sequencer, a small model.

Commands arrive at given steps, so that one script is one run. `Turns` that ended are compared with
what the model's arithmetic gives without communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from interlace.comm.journal import Journal
from interlace.comm.path import Path
from interlace.comm.plan import Mode, PlanConfig
from interlace.comm.progress import Progress
from interlace.comm.sequencer import Sequencer, record_program
from interlace.comm.testing import LocalWorld
from interlace.moe.description import Description
from interlace.moe.model import Model
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.engine import Engine
from interlace.rollout.group import Follower, Leader, Part
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.local import LocalTransport
from interlace.rollout.launch.transport import Groups, Transport
from interlace.rollout.messages import Abort, Event, LeaderCommand, Stop, TurnRequest, TurnResult
from interlace.rollout.scheduler import Scheduler

from .hazard import WrongDataError
from .small_model import BLOCK_SIZE, EXPERT_SHAPE, SmallModel, expected, stub_result

Script = Mapping[int, Sequence[tuple[int, LeaderCommand]]]
"""By leader: (step, what arrives in it), in order of steps. `Stop` is added behind the last."""


def turn(
    trajectory: int, num_prompt: int, num_new: int, *, prompt: int | None = None
) -> TurnRequest:
    """A greedy turn; its prompt is the one numbered `prompt`, by default after the trajectory."""
    first = 7 * (trajectory if prompt is None else prompt)
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=[(first + 3 * at) % 89 for at in range(num_prompt)],
        seed=0,
        experts_from=0,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_new),
    )


class _ScriptedInbox(Inbox):
    """Drained once a step, so the number of drainings is the step."""

    def __init__(self, script: Sequence[tuple[int, LeaderCommand]]) -> None:
        super().__init__()
        last = max((step for step, _ in script), default=0)
        self._script = [*script, (last, Stop())]
        self._step = 0

    def drain(self) -> list[LeaderCommand]:
        now = [command for step, command in self._script if step == self._step]
        self._step += 1
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is equal on all ranks of a small rollout."""

    world: int = 2
    tp: int = 1
    mode: Mode = "multiplexed"
    chunk_tokens: int = 4
    max_context: int = 64
    num_blocks: Mapping[int, int] = field(default_factory=dict)
    """KV blocks of a leader's pool, where it is not 32."""

    def blocks_of(self, rank: int) -> int:
        return self.num_blocks.get(rank - rank % self.tp, 32)

    @property
    def groups(self) -> dict[str, Groups]:
        groups: dict[str, Groups] = {"ep": (tuple(range(self.world)),)}
        if self.tp > 1:
            groups["tp"] = self.tp_groups
        return groups

    @property
    def tp_groups(self) -> Groups:
        return tuple(tuple(range(at, at + self.tp)) for at in range(0, self.world, self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRank:
    """One rank of a small rollout, ready to run."""

    engine: Engine
    model: SmallModel
    results: dict[int, TurnResult]
    """By trajectory; filled while it runs."""


def compose_small(
    transport: Transport,
    size: Size,
    script: Sequence[tuple[int, LeaderCommand]],
    *,
    model: type[SmallModel] = SmallModel,
    emit: Callable[[Event], None] | None = None,
    healthy: type[SmallModel] = SmallModel,
    sequencer: type[Sequencer] = Sequencer,
    progress: Progress | None = None,
    epoch: int = 0,
    timeout_s: float = 5.0,
) -> SmallRank:
    """A rank from parts that are shipped, but for its model. `script` is its leader's; the
    programs of its paths are those of the model `healthy`."""
    rank = transport.rank
    small = model(rank=rank, world=size.world, tp=size.tp, num_blocks=size.blocks_of(rank))
    sizes = {role: len(partition[0]) for role, partition in size.groups.items()}
    sound = healthy(rank=rank, world=size.world, tp=size.tp, num_blocks=1)
    works: dict[str, tuple[str, ...]] = {"decode": ("decode",), "prefill": ("prefill",)}
    if size.mode == "chunked":
        works = {"mixed": ("decode", "prefill")}
    programs = {
        name: record_program(sound.forward(None, name, Description()), sizes, stub_result)
        for name in works
    }
    paths = tuple(
        Path(name=name, groups=size.groups, program=program, whole="decode" in work, work=work)
        for (name, work), program in zip(works.items(), programs.values(), strict=True)
    )
    walker = sequencer(
        rank=rank,
        paths=paths,
        communicators={
            (path.name, role): transport.communicator(path.name, role, partition)
            for path in paths
            for role, partition in sorted(path.groups.items())
        },
        around=transport.around,
        clock=transport.clock,
        journal=Journal(),
        progress=progress,
        posts=transport.posts,
    )
    results: dict[int, TurnResult] = {}

    def keep(event: Event) -> None:
        if isinstance(event, TurnResult):
            results[event.trajectory] = event
        if emit is not None:
            emit(event)

    engine = Engine(
        rank=rank,
        config=PlanConfig(paths=paths, mode=size.mode, park_ms=1),
        sequencer=walker,
        control=transport.control(timeout_s),
        model=cast(Model, small),
        weights=cast(Any, None),
        contexts=cast(Any, {name: name for name in works}),
        part=_part(transport, size, {path.name: path for path in paths}, script, keep, timeout_s),
        chunk_tokens=size.chunk_tokens,
        clock=transport.clock,
        epoch=epoch,
    )
    return SmallRank(engine=engine, model=small, results=results)


def _part(
    transport: Transport,
    size: Size,
    paths: Mapping[str, Path],
    script: Sequence[tuple[int, LeaderCommand]],
    emit: Callable[[Event], None],
    timeout_s: float,
) -> Part:
    group_control = None
    if size.tp > 1:
        group_control = transport.group_control(size.tp_groups, timeout_s)
        if transport.rank % size.tp:
            return Follower(group_control)
    scheduler = Scheduler(
        blocks=BlockManager(num_blocks=size.blocks_of(transport.rank), block_size=BLOCK_SIZE),
        chunk_tokens=size.chunk_tokens,
        max_running=8,
        max_context=size.max_context,
        expert_shape=EXPERT_SHAPE,
        text_of=lambda _: "",
    )
    return Leader(
        paths=paths,
        scheduler=scheduler,
        inbox=_ScriptedInbox(script),
        emit=emit,
        followers=group_control,
    )


def small_world(size: int, *, seed: int = 0, **kwargs: Any) -> LocalWorld:
    """A LocalWorld whose payloads are tensors, or byte strings."""

    def copy(part: Any) -> Any:
        return part.clone() if isinstance(part, torch.Tensor) else part

    def split(payload: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        return torch.split(payload, list(counts))

    options: dict[str, Any] = {"split": split, "concat": torch.cat, "copy": copy, **kwargs}
    return LocalWorld(size, seed=seed, **options)


def run_small(
    size: Size,
    script: Script,
    *,
    seed: int = 0,
    serial_slots: int = 1,
    models: Mapping[int, type[SmallModel]] | None = None,
) -> list[SmallRank]:
    """Run it in this process, on a device that is strict about order, and check every token.

    `models` puts another model on some ranks. Raises WrongDataError for a wrong or missing token,
    and whatever the ranks raise.
    """
    world = small_world(size.world, seed=seed, serial_slots=serial_slots)
    killed = threading.Event()
    ranks = [
        compose_small(
            LocalTransport(world, rank, killed),
            size,
            script.get(rank, ()),
            model=(models or {}).get(rank, SmallModel),
        )
        for rank in range(size.world)
    ]
    world.run([rank.engine.run() for rank in ranks])
    for number, small in enumerate(ranks):
        if number % size.tp == 0:
            check_tokens(size, script.get(number, ()), small.results)
    return ranks


def check_tokens(
    size: Size, script: Sequence[tuple[int, LeaderCommand]], results: Mapping[int, TurnResult]
) -> None:
    """WrongDataError unless every turn of the script ended with its tokens; an aborted one with
    the first of them."""
    aborted = {command.trajectory for _, command in script if isinstance(command, Abort)}
    for _, request in script:
        if not isinstance(request, TurnRequest):
            continue
        result = results.get(request.trajectory)
        if result is None:
            raise WrongDataError(f"trajectory {request.trajectory} has no result")
        room = size.max_context - len(request.token_ids)
        wanted = min(request.sampling.max_tokens, room)
        if request.trajectory in aborted:
            wanted = len(result.token_ids)
        right = expected(request.token_ids, wanted, tp=size.tp)
        if result.token_ids != right:
            raise WrongDataError(
                f"trajectory {request.trajectory}: tokens {result.token_ids} are not {right}"
            )


def same_collectives(ranks: Sequence[SmallRank]) -> str:
    """How many collectives every rank took part in, in words; WrongDataError if they differ."""
    taken = [
        sorted((r.seq, r.path, r.role, r.stage) for r in rank.engine.journal.tickets)
        for rank in ranks
    ]
    if any(other != taken[0] for other in taken):
        raise WrongDataError(f"ranks took part in {[len(each) for each in taken]} collectives")
    return f"all tokens right, the same {len(taken[0])} collectives on {len(ranks)} ranks"
