"""The ways in which a path's rows may reach their experts."""

from __future__ import annotations

from typing import Literal

from .dispatch import AllToAllDispatcher, Dispatcher
from .dispatch_fixed import FixedDispatcher
from .dispatch_gather import GatherDispatcher
from .placement import Placement

Strategy = Literal["all_to_all", "fixed", "gather"]


def dispatcher_of(
    strategy: Strategy, *, placement: Placement, ep_rank: int, capacity: int
) -> Dispatcher:
    """The dispatcher of one forward pass. All strategies give the same bits.

    `capacity` is the agreed bound on the rows a rank dispatches; `all_to_all` needs none.
    """
    match strategy:
        case "all_to_all":
            return AllToAllDispatcher(placement=placement, ep_rank=ep_rank)
        case "fixed":
            return FixedDispatcher(placement=placement, ep_rank=ep_rank, capacity=capacity)
        case "gather":
            return GatherDispatcher(placement=placement, ep_rank=ep_rank, capacity=capacity)
