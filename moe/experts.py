"""The experts one rank owns.

Shapes: R rows sorted by expert, D hidden, I width of an expert (padded), X own experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .linear import Linear

WIDTH_MULTIPLE = 32
"""silu's bits depend on the number of rows when its width is no multiple of this (measured)."""


class Expert:
    """One gated MLP, ``down(silu(gate(x)) * up(x))``, its width padded with zeros."""

    __slots__ = ("down", "gate_up")

    def __init__(
        self, *, gate_ID: torch.Tensor, up_ID: torch.Tensor, down_DI: torch.Tensor
    ) -> None:
        padding = -gate_ID.shape[0] % WIDTH_MULTIPLE
        wide = (0, 0, 0, padding)
        self.gate_up = Linear(torch.cat((F.pad(gate_ID, wide), F.pad(up_ID, wide))))
        self.down = Linear(F.pad(down_DI, (0, padding)))

    def __call__(self, x_RD: torch.Tensor) -> torch.Tensor:
        """[R, D]"""
        gate_RI, up_RI = self.gate_up(x_RD).chunk(2, dim=-1)
        return self.down(F.silu(gate_RI).mul_(up_RI))


def apply_experts(
    experts: Sequence[Expert], x_RD: torch.Tensor, counts_X: Sequence[int]
) -> torch.Tensor:
    """[R, D] each row's expert applied to it: one product per expert and matrix.

    Rows are sorted by expert; ``counts_X[i]`` of them belong to ``experts[i]``.
    """
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
