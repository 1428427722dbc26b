"""What a forward pass knows about the place it runs in."""

from __future__ import annotations

from dataclasses import dataclass

from .dispatch_strategy import Strategy
from .kv_cache import KVCache
from .placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PathContext:
    """One path on one rank. Passed explicitly to every forward pass; there is no global one."""

    path: str
    """The path's configured name, for errors."""
    tp_rank: int = 0
    tp_size: int = 1
    """The path's tensor-parallel group on this rank (role "tp")."""
    ep_rank: int = 0
    ep_size: int = 1
    """The path's expert-parallel group on this rank (role "ep")."""
    kv: KVCache
    expert_placement: Placement
    dispatch: Strategy = "all_to_all"
    """How rows reach their experts. Its choice changes the program, never a bit."""
    preemptible: bool = False
    """Whether the pass offers to stand aside within long stretches of computation."""
