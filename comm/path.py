"""A path is configuration: who takes part, over which groups, in which program of collectives."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One collective of a program, without its data."""

    kind: str
    """Name of the request type: Gather or Exchange."""
    role: str
    """Which of the path's groups it runs over."""
    stage: str
    """Where in the forward pass: layer and purpose."""
    work: int = 1
    """Computation that leads to it, beside that of the program's others."""
    crc: int = field(init=False, repr=False, compare=False)
    """crc32 of the stage: what headers and hashes hold of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "crc", zlib.crc32(self.stage.encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One stream of forward passes. Paths share weights and KV blocks and nothing else.

    The name is free: nothing is decided by it. `work` says which rows it carries.
    """

    name: str
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    """Role -> partition of the members; every rank resolves its own group."""
    program: tuple[Op, ...]
    """The collectives of ONE forward pass, in order; the same for an empty batch."""
    whole: bool
    """The whole program runs inside one step; otherwise it may span several."""
    work: tuple[str, ...]
    """Kinds of rows: decode, prefill; or transfer, of KV blocks between ranks."""

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(rank for group in next(iter(self.groups.values())) for rank in group))

    def group_of(self, role: str, rank: int) -> tuple[int, ...]:
        """The group of `role` that holds `rank`; ValueError if none does."""
        for group in self.groups.get(role, ()):
            if rank in group:
                return group
        raise ValueError(f"path {self.name}: rank {rank} is in no group of role {role!r}")


@dataclass(slots=True, unsafe_hash=True)
class Ticket:
    """Permission to issue one collective, named the same way on every rank.

    `seq` is the place in the one order over all paths. `comm_seq` counts per (path, role): the
    members of one communicator agree on it, so ``slot = comm_seq mod slots`` is never implicit.
    Never changed; frozen it would be made three times as slowly, in every step.
    """

    epoch: int
    step: int
    seq: int
    path: str
    path_seq: int
    comm_seq: int
    slot: int
    op: Op
    version: int
    """Weight version the forward pass runs under."""
    rows: int
    """Agreed upper bound of rows per rank for a decode ticket; 0 where none is agreed."""

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch} step {self.step} seq {self.seq} "
            f"{self.path}/{self.op.role} {self.op.stage}"
        )
