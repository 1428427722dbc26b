"""Composes one rank from its parts and runs it to its last word."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
from tokenizers import Tokenizer

from interlace.comm.collectives import Finish, Gather, perform
from interlace.comm.driver import run_blocking
from interlace.comm.journal import Journal
from interlace.comm.path import Path
from interlace.comm.plan import PlanConfig
from interlace.comm.sequencer import Sequencer, record_program
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache, attention_planes
from interlace.moe.model import Model
from interlace.moe.placement import Placement
from interlace.moe.program import stub_result
from interlace.moe.selftest import exactness
from interlace.moe.weights import load_weights
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.config import RolloutConfig
from interlace.rollout.engine import Engine
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Event, RankFailure, RankReady, RankReport
from interlace.rollout.scheduler import Scheduler

from .transport import Transport

SLOTS = 2
"""Receive slots of each communicator. Every collective is one in which everybody waits for
everybody, so two are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A loop ready to run, and what it tells the collector about itself."""

    engine: Engine
    ready: RankReady


def compose(
    config: RolloutConfig,
    folder: FilePath,
    transport: Transport,
    inbox: Inbox,
    emit: Callable[[Event], None],
) -> Rank:
    """Load this rank's share of the model and put its loop together."""
    model_config = read_config(folder)
    dtype = _dtype(config, model_config)
    world, rank = config.layout.world, transport.rank
    placement = Placement.contiguous(model_config.num_experts, world)
    weights = load_weights(folder, model_config, expert_ids=placement.experts_of(rank), dtype=dtype)
    kv = KVCache(
        num_layers=model_config.num_layers,
        num_blocks=config.scheduler.num_blocks,
        planes=attention_planes(model_config),
        dtype=dtype,
        device=transport.device,
    )
    model = Model(model_config)
    contexts = {
        name: PathContext(path=name, ep_rank=rank, ep_size=world, kv=kv, expert_placement=placement)
        for name in ("decode", "prefill")
    }
    groups = {"ep": (tuple(range(world)),)}
    paths = []
    for name, context in contexts.items():
        with transport.around(name):
            forward = model.forward(weights, context, Description())
            program = record_program(forward, {"ep": world}, stub_result)
        whole = name == "decode"
        paths.append(Path(name=name, groups=groups, program=program, whole=whole, work=(name,)))
    max_context = min(
        config.model.max_context or model_config.max_positions, model_config.max_positions
    )
    sequencer = Sequencer(
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
    )
    with transport.around("decode"):
        exact = exactness(model, weights, placement=placement, ep_rank=rank).exact
    engine = Engine(
        rank=rank,
        config=PlanConfig(
            paths=tuple(paths),
            mode=config.mode,
            slots=SLOTS,
            chunk_steps=config.scheduler.chunk_steps,
            start_tokens=config.scheduler.start_tokens,
            start_steps=config.scheduler.start_steps,
            park_ms=config.scheduler.park_ms,
        ),
        sequencer=sequencer,
        control=transport.control(config.launch.exchange_timeout_s),
        model=model,
        weights=weights,
        contexts=contexts,
        scheduler=Scheduler(
            blocks=BlockManager(num_blocks=config.scheduler.num_blocks, block_size=BLOCK_SIZE),
            chunk_tokens=config.scheduler.chunk_tokens,
            max_running=config.scheduler.max_running,
            max_context=max_context,
            expert_shape=(model_config.num_layers, model_config.top_k),
            text_of=_text_of(folder),
        ),
        inbox=inbox,
        emit=emit,
        clock=transport.clock,
    )
    ready = RankReady(
        rank=rank,
        exact=exact,
        max_context=max_context,
        pool_tokens=config.scheduler.num_blocks * BLOCK_SIZE,
        vocab_size=model_config.vocab_size,
        stop_token_ids=list(model_config.eos_token_ids),
    )
    return Rank(engine=engine, ready=ready)


def report(rank: int, journal: Journal, cpu_s: float) -> RankReport:
    """The last word of a rank that left its loop in order."""
    return RankReport(
        rank=rank, cpu_s=cpu_s, steps=list(journal.steps), tickets=list(journal.tickets)
    )


def failure(rank: int, error: BaseException) -> RankFailure:
    """The last word of a rank that raised."""
    return RankFailure(
        rank=rank,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def run_process(
    config: RolloutConfig,
    folder: FilePath,
    transport: Transport,
    inbox: Inbox,
    emit: Callable[[Event], None],
    killed: threading.Event,
) -> None:
    """A rank process from loading to its last word: RankReport, or RankFailure and the error.

    Once `killed` is set the next wait raises Killed.
    """

    def park(seconds: float) -> None:
        _check(killed)
        inbox.wait(seconds)

    def pause(seconds: float) -> None:
        _check(killed)
        time.sleep(seconds)

    try:
        rank = compose(config, folder, transport, inbox, emit)
        # Ranks load at different speeds; the short deadlines hold from here on.
        meeting = _meet(transport, config.launch.load_timeout_s)
        run_blocking(meeting, park=park, pause=pause)
        emit(rank.ready)
        ready_at = time.process_time()
        journal = run_blocking(rank.engine.run(), park=park, pause=pause)
    except BaseException as error:
        emit(failure(transport.rank, error))
        raise
    emit(report(transport.rank, journal, time.process_time() - ready_at))


class Killed(Exception):
    """Ends a rank that is not wanted any more."""


def _check(killed: threading.Event) -> None:
    if killed.is_set():
        raise Killed("its program left the rollout early, or rank 0 was gone")


async def _meet(transport: Transport, timeout_s: float) -> None:
    control = transport.control(timeout_s)
    handle = control.post(Gather(role="control", stage="loaded", payload=b"loaded"), None)
    where = f"rank {transport.rank}: every rank has loaded its weights"
    await perform(Finish(communicator=control, handle=handle, where=where))


def _dtype(config: RolloutConfig, model_config: ModelConfig) -> torch.dtype:
    name = model_config.dtype if config.model.dtype == "auto" else config.model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _text_of(folder: FilePath) -> Callable[[Sequence[int]], str]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return lambda _: ""
    tokenizer = Tokenizer.from_file(str(file))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
