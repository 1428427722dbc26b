"""Puts one rank together from its parts: weights, cache, paths, communicators, scheduler, loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import torch
from tokenizers import Tokenizer

from interlace.comm.collectives import Forward
from interlace.comm.communicator import Communicator
from interlace.comm.journal import Journal
from interlace.comm.path import Path
from interlace.comm.plan import PlanConfig, Policy
from interlace.comm.progress import Progress
from interlace.comm.sequencer import record_program
from interlace.comm.unsafe import unsafe_sequencer
from interlace.comm.warm import warm
from interlace.comm.window import WindowCommunicator
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.dispatch_strategy import READ_COUNTS
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache, attention_planes, bytes_per_block
from interlace.moe.model import Model
from interlace.moe.placement import Placement
from interlace.moe.program import stub_result
from interlace.moe.program_work import with_work
from interlace.moe.selftest import exactness
from interlace.moe.weights import Weights, load_weights
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.config import Layout, RolloutConfig
from interlace.rollout.decode_side import DecodeSide
from interlace.rollout.engine import Engine
from interlace.rollout.group import Follower, Part, Side
from interlace.rollout.inbox import Inbox
from interlace.rollout.kv_versions import KVVersions
from interlace.rollout.messages import Event, RankReady
from interlace.rollout.outbox import Outbox
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.shipment import Shipment
from interlace.rollout.transfer import transfer
from interlace.rollout.unsafe import unsafe_leader, unsafe_model, unsafe_program
from interlace.rollout.weights_sync.stager import Stager

from .largest_message import largest_message
from .memory import affordable_blocks
from .transport import Groups, Transport
from .unsafe_communicators import unsafe_communicators

SLOTS = 2
"""Receive slots of each communicator. Every collective is one in which everybody waits for
everybody, so two are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A loop ready to run, and what it tells the collector about itself."""

    engine: Engine
    ready: RankReady
    paths: tuple[Path, ...]
    """Those it takes part in."""
    stager: Stager
    """To be entered for as long as the loop runs."""
    first_use: Callable[[], Forward] | None
    """To be driven before the first step where groups begin to exist only when they are used."""


def compose(
    config: RolloutConfig,
    folder: FilePath,
    transport: Transport,
    inbox: Inbox,
    emit: Callable[[Event], None],
    *,
    num_blocks: int,
    progress: Progress | None = None,
) -> Rank:
    """Load this rank's share of the model and put its loop together.

    `num_blocks` of KV cache, the same on every rank (`blocks_for` says how many fit this one).
    """
    model_config = read_config(folder)
    dtype = _dtype(config, model_config)
    layout, rank = config.layout, transport.rank
    side = layout.side(rank)
    ep_rank = side.index(rank)
    placement = Placement.contiguous(model_config.num_experts, len(side))
    weights = load_weights(
        folder,
        model_config,
        expert_ids=placement.experts_of(ep_rank),
        dtype=dtype,
        device=transport.device,
        tp_rank=rank % layout.tp,
        tp_size=layout.tp,
    )
    model = unsafe_program(config.unsafe.arms)(model_config)
    kv = KVCache(
        num_layers=model_config.num_layers,
        num_blocks=num_blocks,
        planes=attention_planes(model_config, layout.tp),
        dtype=dtype,
        device=transport.device,
    )
    if transport.device.type == "cuda":
        # What was put on this thread's stream so far, every path's stream may use from here on.
        torch.cuda.synchronize(transport.device)
    contexts = {
        name: PathContext(
            path=name,
            tp_rank=rank % layout.tp,
            tp_size=layout.tp,
            ep_rank=rank if "transfer" in work else ep_rank,
            ep_size=layout.world if "transfer" in work else len(side),
            kv=kv,
            expert_placement=placement,
            dispatch=config.dispatch.of(work),
            preemptible=work == ("prefill",)
            and config.mode == "multiplexed"
            and (transport.carrier.kind != "window" or config.launch.link is not None),
            waits=waits,
            buckets=work == ("decode",) and not waits,
        )
        for name, work in _works(config.mode).items()
        for waits in [transport.device.type == "cpu" or config.dispatch.of(work) in READ_COUNTS]
    }
    paths = _paths(config, model, weights, contexts, transport)
    mine = tuple(path for path in paths if rank in path.members)
    unsafe = config.unsafe
    communicators = {
        (path.name, role): communicator
        for path in paths
        for role, partition in sorted(path.groups.items())
        # made by all ranks, kept by members
        for communicator in [
            transport.communicator(
                path.name,
                role,
                _of_all_ranks(partition, layout),
                largest_message(config, model_config, path.work),
            )
        ]
        if path in mine
    }
    windows = {} if unsafe.arms else _windows(communicators)
    crossings = {
        key: window.cross
        for key, window in windows.items()
        if window.can_cross and not config.launch.check_each_op
    }
    contexts = {
        name: replace(context, straight=(name, "ep") in crossings)
        for name, context in contexts.items()
    }
    sequencer = unsafe_sequencer(unsafe.arms, unsafe.without, seed=unsafe.seed, slots=SLOTS)(
        rank=rank,
        paths=paths,
        communicators=unsafe_communicators(unsafe.arms, communicators, slots=SLOTS),
        around=transport.around,
        clock=transport.clock,
        journal=Journal(config.launch.journal_limit),
        progress=progress,
        posts=transport.posts,
        prechecks=_prechecks(config, paths, transport),
        meeting=_meeting(config, transport),
        crossings=crossings,
        watches={key: window.watch for key, window in windows.items()},
    )
    with transport.around(mine[-1].name):
        exact = exactness(model, weights, placement=placement, ep_rank=ep_rank).exact
    max_context = min(
        config.model.max_context or model_config.max_positions, model_config.max_positions
    )
    stager = Stager(
        rank=rank,
        folder=folder,
        config=model_config,
        section=config.weights,
        weights=weights,
        inbox=inbox,
        emit=emit,
    )
    engine = Engine(
        rank=rank,
        config=PlanConfig(
            paths=paths,
            mode="serial" if config.mode == "replicas" else config.mode,
            slots=SLOTS,
            chunk_steps=config.scheduler.chunk_steps,
            start_tokens=config.scheduler.start_tokens,
            start_steps=config.scheduler.start_steps,
            park_ms=config.scheduler.park_ms,
            policy=_policy(config, weights, contexts),
            layers_per_boundary=config.order.layers_per_boundary,
        ),
        sequencer=sequencer,
        control=transport.control(config.launch.exchange_timeout_s),
        model=unsafe_model(unsafe.arms)(model_config),
        weights=weights,
        contexts=contexts,
        part=_part(
            config, folder, model_config, max_context, num_blocks, mine, transport, inbox, emit
        ),
        chunk_tokens=config.scheduler.chunk_tokens,
        clock=transport.clock,
        updates=stager,
    )
    ready = RankReady(
        rank=rank,
        exact=exact and not unsafe.arms,
        max_context=max_context,
        pool_tokens=num_blocks * BLOCK_SIZE,
        vocab_size=model_config.vocab_size,
        stop_token_ids=list(model_config.eos_token_ids),
        transport=transport.carrier.kind,
        transport_why=transport.carrier.why,
    )
    first_use = None
    if transport.carrier.kind in ("gloo", "nccl"):
        first_use = _first_use(transport, communicators, {path.name: path for path in mine})
    return Rank(engine=engine, ready=ready, paths=mine, stager=stager, first_use=first_use)


def _first_use(
    transport: Transport,
    communicators: Mapping[tuple[str, str], Communicator],
    paths: Mapping[str, Path],
) -> Callable[[], Forward]:
    def pack(told: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(told), dtype=torch.uint8).to(transport.device)

    def unpack(answer: torch.Tensor) -> bytes:
        return bytes(answer.cpu().numpy())

    rank = transport.rank
    members = {(name, role): paths[name].group_of(role, rank) for name, role in communicators}
    return lambda: warm(rank, communicators, members, pack=pack, unpack=unpack)


def _windows(
    communicators: Mapping[tuple[str, str], Communicator],
) -> dict[tuple[str, str], WindowCommunicator]:
    """Those that pass through windows."""
    return {
        key: communicator
        for key, communicator in communicators.items()
        if isinstance(communicator, WindowCommunicator)
    }


def _policy(config: RolloutConfig, weights: Weights, contexts: Mapping[str, PathContext]) -> Policy:
    """How steps are ordered. Side by side only where it is not dearer: where both passes of a step
    go straight, and no message is worth computing for while it travels."""
    order, straight = config.order, weights.straight
    if order.policy != "auto":
        return order.policy
    goes = straight is not None and all(straight.fits(one) for one in contexts.values())
    multiplexed = config.mode == "multiplexed" and not order.layers_per_boundary
    return "abreast" if multiplexed and goes else "plan"


def _prechecks(
    config: RolloutConfig, paths: Sequence[Path], transport: Transport
) -> dict[tuple[str, str], Communicator] | None:
    if not config.launch.check_each_op:
        return None
    timeout_s = config.launch.ticket_timeout_s
    return {
        (path.name, role): transport.group_control(
            _of_all_ranks(partition, config.layout), timeout_s, f"before {path.name}/{role}"
        )
        for path in paths
        for role, partition in sorted(path.groups.items())
    }


def _meeting(config: RolloutConfig, transport: Transport) -> Communicator | None:
    if config.order.policy != "turnstile":
        return None
    everybody = (tuple(range(config.layout.world)),)
    return transport.group_control(everybody, config.launch.exchange_timeout_s, "meeting")


def blocks_for(config: RolloutConfig, folder: FilePath, device: torch.device) -> int:
    """The KV blocks this rank can hold, at most `scheduler.num_blocks`."""
    model_config = read_config(folder)
    size = bytes_per_block(model_config, _dtype(config, model_config), config.layout.tp)
    return affordable_blocks(
        config.scheduler.num_blocks,
        block_bytes=size,
        folder=folder,
        sharers=config.layout.world if device.type == "cpu" else 1,  # a rank has a GPU to itself
        device=device,
    )


def _works(mode: str) -> dict[str, tuple[str, ...]]:
    """The paths of a mode, in order of precedence, and the work each does."""
    if mode == "chunked":
        return {"mixed": ("decode", "prefill")}
    names = ("transfer", "decode", "prefill") if mode == "disaggregated" else ("decode", "prefill")
    return {name: (name,) for name in names}


def _tp_groups(members: Sequence[int], tp: int) -> Groups:
    return tuple(tuple(members[at : at + tp]) for at in range(0, len(members), tp))


def _of_all_ranks(groups: Groups, layout: Layout) -> Groups:
    """A partition of all ranks, the same on each: all of them make communicators together.

    Those of other replicas are like this one's; who is in no group is in one with the rest.
    """
    size = len(layout.engine(0))
    alike = tuple(
        tuple(first + rank % size for rank in group)
        for first, *_ in layout.engines
        for group in groups
    )
    rest = set(range(layout.world)).difference(*alike)
    return (*alike, tuple(sorted(rest))) if rest else alike


def _paths(
    config: RolloutConfig,
    model: Model,
    weights: Weights,
    contexts: Mapping[str, PathContext],
    transport: Transport,
) -> tuple[Path, ...]:
    layout, paths = config.layout, []
    for name, work in _works(config.mode).items():
        members, context = layout.members(work, transport.rank), contexts[name]
        groups: dict[str, Groups] = {"all" if "transfer" in work else "ep": (members,)}
        if layout.tp > 1 and "transfer" not in work:
            groups["tp"] = _tp_groups(members, layout.tp)
        sizes = {"all": context.ep_size, "ep": context.ep_size, "tp": context.tp_size}
        with transport.around(name):
            forward: Forward = (
                transfer(context, Shipment())
                if "transfer" in work
                else model.forward(weights, context, Description())
            )
            program = record_program(forward, sizes, stub_result)
        if "transfer" not in work:
            program = with_work(program, model.config, layout.tp)
        whole = work != ("prefill",)
        paths.append(Path(name=name, groups=groups, program=program, whole=whole, work=work))
    return tuple(paths)


def _part(
    config: RolloutConfig,
    folder: FilePath,
    model_config: ModelConfig,
    max_context: int,
    num_blocks: int,
    paths: Sequence[Path],
    transport: Transport,
    inbox: Inbox,
    emit: Callable[[Event], None],
) -> Part:
    group_control = None
    if config.layout.tp > 1:
        timeout_s = config.launch.exchange_timeout_s
        groups = _tp_groups(range(config.layout.world), config.layout.tp)
        group_control = transport.group_control(groups, timeout_s)
        if transport.rank % config.layout.tp:
            return Follower(group_control)
    scheduler = Scheduler(
        blocks=BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        chunk_tokens=config.scheduler.chunk_tokens,
        max_running=config.scheduler.max_running,
        max_context=max_context,
        expert_shape=(model_config.num_moe_layers, model_config.top_k),
        text_of=_text_of(config, folder),
        kv=_kv_versions(config, transport.rank),
    )
    return unsafe_leader(config.unsafe.arms)(
        paths={path.name: path for path in paths},
        scheduler=scheduler,
        inbox=inbox,
        emit=emit,
        followers=group_control,
        side=_side(config, transport.rank, scheduler),
    )


def _kv_versions(config: RolloutConfig, rank: int) -> KVVersions:
    """Whoever prefills for others uses what is current; how old a turn may grow is for those to
    say who decode it."""
    if rank in config.layout.prefill_leaders:
        return KVVersions()
    weights = config.weights
    return KVVersions(max_staleness=weights.max_kv_staleness, reuse=weights.reuse_prefix)


def _side(config: RolloutConfig, rank: int, scheduler: Scheduler) -> Side | None:
    prefill_leaders = config.layout.prefill_leaders
    if not prefill_leaders:
        return None
    if rank in prefill_leaders:
        return PrefillSide(scheduler=scheduler, outbox=Outbox())
    return DecodeSide(scheduler=scheduler, outbox=Outbox(), prefill_leaders=prefill_leaders)


def _dtype(config: RolloutConfig, model_config: ModelConfig) -> torch.dtype:
    name = model_config.dtype if config.model.dtype == "auto" else config.model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _text_of(config: RolloutConfig, folder: FilePath) -> Callable[[Sequence[int]], str]:
    """Tokens as text; the tokenizer is loaded only where stop strings ask for it."""
    if not config.sampling.stop_strings:
        return lambda _: ""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
