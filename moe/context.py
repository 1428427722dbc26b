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
    waits: bool = True
    """Whether the host may wait within a forward pass, to read from the device how many rows go
    where. Where it is far from the device it should not; `all_to_all` must."""
    buckets: bool = False
    """Whether batches, all of decode rows, are padded to few shapes. It changes no bit of a row."""
    straight: bool = False
    """Whether the pass offers to go through all its layers in one call (see `straight`)."""

    @property
    def replicated(self) -> bool:
        """Whether all ranks of the tensor-parallel group, who share all experts, hold every row."""
        return self.dispatch == "replicated"
