"""How cases of processes begin: by joining a group over gloo, or as a rank of a small rollout."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from interlace.comm.driver import run_blocking
from interlace.rollout.config import Launch
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.messages import Event

from .small_model import SmallModel
from .small_rollout import Script, Size, check_tokens, compose_small


def join(rank: int, size: int, folder: str, *, timeout_s: float = 20.0) -> None:
    """Make the default process group over gloo; its store waits at most `timeout_s`."""
    torch.set_num_threads(1)
    Path(folder).mkdir(exist_ok=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def run_over_gloo(
    rank: int,
    size: int,
    folder: str,
    script: Script,
    *,
    model: type[SmallModel] = SmallModel,
    transport: type[ProcessTransport] = ProcessTransport,
    emit: Callable[[Event], None] | None = None,
    composed: Callable[[], None] = lambda: None,
    ticket_timeout_s: float = 5.0,
) -> str:
    """One rank of a small rollout over the shipped transport; its tokens are checked.

    `composed` is called before the first step. Says in how many collectives the rank took part.
    Raises whatever ends it.
    """
    Path(folder).mkdir(exist_ok=True)
    store = FileStore(f"{folder}/transport", size)
    launch = Launch(
        kind="torchrun",
        transport="gloo",
        exchange_timeout_s=10.0,
        ticket_timeout_s=ticket_timeout_s,
    )
    arrives = script.get(rank, ())
    with transport(rank=rank, world=size, store=store, launch=launch) as joined:
        small = compose_small(joined, Size(world=size), arrives, model=model, emit=emit)
        composed()
        run_blocking(small.engine.run(), park=time.sleep)
    check_tokens(Size(world=size), arrives, small.results)
    num = len(small.engine.journal.tickets)
    return f"all tokens right, {num} collectives on each of {size} ranks"
