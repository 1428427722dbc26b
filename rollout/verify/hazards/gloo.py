"""Joining a process group over gloo, as every case of processes begins."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import FileStore

from interlace.rollout.config import Launch
from interlace.rollout.launch.processes import ProcessTransport


def join(rank: int, size: int, folder: str, *, timeout_s: float = 20.0) -> None:
    """Make the default process group over gloo; its store waits at most `timeout_s`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def transport_of(rank: int, size: int, folder: str, **launch: object) -> ProcessTransport:
    """The shipped transport of one rank process, over gloo."""
    store = FileStore(f"{folder}/transport", size)
    options = Launch.model_validate({"backend": "gloo", **launch})
    return ProcessTransport(rank=rank, world=size, store=store, launch=options)
