"""The experts one rank owns.

Shapes: N rows in any order, R rows sorted by expert, D hidden, I width of an expert (padded), X own
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import kernels
from .arena import Arena
from .linear import Linear

WIDTH_MULTIPLE = 32
"""silu's bits depend on the number of rows when its width is no multiple of this (measured)."""


class Expert:
    """One gated MLP, ``down(silu(gate(x)) * up(x))``, its width padded with zeros."""

    __slots__ = ("down", "gate_up", "packed")

    def __init__(
        self,
        *,
        gate_ID: torch.Tensor,
        up_ID: torch.Tensor,
        down_DI: torch.Tensor,
        arena: Arena | None = None,
    ) -> None:
        """Where our kernels multiply with its weights, they are `packed`, into `arena`."""
        padding = -gate_ID.shape[0] % WIDTH_MULTIPLE
        wide = (0, 0, 0, padding)
        gate_ID, up_ID = F.pad(gate_ID, wide), F.pad(up_ID, wide)
        down_DI = F.pad(down_DI, (0, padding))
        self.packed: kernels.PackedExpert | None = None
        if kernels.can_pack(gate_ID):
            self.packed = kernels.PackedExpert(
                gate_ID=gate_ID, up_ID=up_ID, down_DI=down_DI, arena=arena
            )
            return
        self.gate_up = Linear(torch.cat((gate_ID, up_ID)))
        self.down = Linear(down_DI)

    def __call__(self, x_RD: torch.Tensor) -> torch.Tensor:
        """[R, D]"""
        return apply_experts((self,), x_RD, (x_RD.shape[0],))


def apply_experts(
    experts: Sequence[Expert],
    x_ND: torch.Tensor,
    counts_X: Sequence[int],
    *,
    reads_R: torch.Tensor | None = None,
    writes_R: torch.Tensor | None = None,
    out_ND: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row's expert applied to it: one call of our kernels, or one product per expert and
    matrix.

    Rows are sorted by expert; ``counts_X[i]`` of them belong to ``experts[i]``. With `reads_R`,
    row i of them is row ``reads_R[i]`` of x. Returned is `out_ND`, or new rows [R, D] if there is
    none: output i is its row i, or with `writes_R` its row ``writes_R[i]``.
    """
    packed = [expert.packed for expert in experts if expert.packed is not None]
    if packed:
        if out_ND is None:
            num_rows = len(x_ND) if reads_R is None else len(reads_R)
            out_ND = x_ND.new_empty((num_rows, x_ND.shape[1]))
        kernels.apply_packed_experts(
            packed, x_ND, counts_X, out_ND, reads_R=reads_R, writes_R=writes_R
        )
        return out_ND
    x_RD = x_ND if reads_R is None else x_ND.index_select(0, reads_R)
    y_RD = _apply_in_torch(experts, x_RD, counts_X)
    if out_ND is None:
        if writes_R is None:
            return y_RD
        out_ND = torch.empty_like(y_RD)
    return out_ND.copy_(y_RD) if writes_R is None else out_ND.index_copy_(0, writes_R, y_RD)


def experts_apart(
    experts: Sequence[Expert],
    x_ND: torch.Tensor,
    counts_X: Sequence[int],
    *,
    reads_R: torch.Tensor | None,
    writes_R: torch.Tensor | None,
    out_ND: torch.Tensor,
) -> object | None:
    """`apply_experts` as a call that can stand aside (`apart`); None where torch does the work."""
    packed = [expert.packed for expert in experts if expert.packed is not None]
    if not packed:
        return None
    return kernels.packed_experts_apart(
        packed, x_ND, counts_X, out_ND, reads_R=reads_R, writes_R=writes_R
    )


def _apply_in_torch(
    experts: Sequence[Expert], x_RD: torch.Tensor, counts_X: Sequence[int]
) -> torch.Tensor:
    """[R, D]"""
    busy = [(expert, count) for expert, count in zip(experts, counts_X, strict=True) if count]
    if not busy:
        return x_RD
    counts = [count for _, count in busy]
    gate_up = _join([e.gate_up(x) for (e, _), x in zip(busy, x_RD.split(counts), strict=True)])
    gate_RI, up_RI = gate_up.chunk(2, dim=-1)
    hidden_RI = F.silu(gate_RI).mul_(up_RI)
    return _join([e.down(h) for (e, _), h in zip(busy, hidden_RI.split(counts), strict=True)])


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
