"""The ways in which a path's rows may reach their experts."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .dispatch import AllToAllDispatcher, Dispatcher
from .dispatch_fixed import FixedDispatcher
from .dispatch_gather import GatherDispatcher
from .dispatch_padded import PaddedDispatcher
from .dispatch_replicated import ReplicatedDispatcher
from .placement import Placement

Strategy = Literal["all_to_all", "fixed", "gather", "replicated"]
READ_COUNTS: tuple[Strategy, ...] = ("all_to_all", "replicated")
"""Those whose sizes are counts that the host reads, and waits for."""


def dispatcher_of(
    strategy: Strategy,
    *,
    placement: Placement,
    ep_rank: int,
    capacity: int,
    waits: bool = True,
    device: str | torch.device = "cpu",
) -> Dispatcher[Any]:
    """The dispatcher of one forward pass on `device`. All strategies give the same bits.

    `capacity` is the agreed bound on the rows a rank dispatches; `all_to_all` and `replicated` need
    none. Unless it
    `waits`, the host reads nothing of what the device has computed. ValueError where `all_to_all`
    or `replicated` must not wait: their sizes are counts that the host reads.
    """
    if not waits:
        if strategy in READ_COUNTS:
            raise ValueError(
                f"dispatch {strategy} reads counts back, so it cannot go without waiting: choose "
                "fixed or gather"
            )
        return PaddedDispatcher(
            placement=placement,
            ep_rank=ep_rank,
            capacity=capacity,
            gathers=strategy == "gather",
            device=torch.device(device),
        )
    match strategy:
        case "all_to_all":
            return AllToAllDispatcher(placement=placement, ep_rank=ep_rank)
        case "fixed":
            return FixedDispatcher(placement=placement, ep_rank=ep_rank, capacity=capacity)
        case "gather":
            return GatherDispatcher(placement=placement, ep_rank=ep_rank, capacity=capacity)
        case "replicated":
            return ReplicatedDispatcher(placement=placement, ep_rank=ep_rank)
