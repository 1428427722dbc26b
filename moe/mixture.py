"""One layer's experts on one rank: choosing, applying and adding up.

Shapes: T rows of this rank, D hidden, K experts a row goes to, R rows received, N rows received
with their padding, X experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.comm.collectives import preemption_point

from . import kernels
from .dispatch import Dispatched
from .dispatch_padded import Padded
from .experts import Expert, apply_experts
from .linear import Linear
from .parts import Mixture
from .router import Routing, padded_sigmoid, route

PIECE_ROWS = 32
"""Rows of a piece of work: a millisecond or two of a core, as long as a small message travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLayer:
    """Router and experts; the rows' way to them and back is a dispatcher's."""

    sizes: Mixture
    router: Linear
    router_bias_X: torch.Tensor | None
    """float32; added to the scores for the choice."""
    experts: tuple[Expert, ...]
    """This rank's own, in the order of `Weights.expert_ids`."""
    shared: Expert | None
    """The expert every row goes to; every rank has it whole."""
    shared_gate: Linear | None
    """What weights the shared expert's output, in its first column; the others are padding."""

    def route(self, h_TD: torch.Tensor) -> Routing:
        if self.sizes.router.precise:
            h_TD = h_TD.float()
        return route(self.router(h_TD), self.sizes.router, self.router_bias_X)

    def apply(self, dispatched: Dispatched | Padded) -> torch.Tensor:
        """[R, D] each row's expert applied to it; of padded rows [X, N, D], every expert to all."""
        if isinstance(dispatched, Padded):
            return apply_all(self.experts, dispatched.rows_ND)
        return apply_experts(self.experts, dispatched.rows_RD, dispatched.expert_counts)

    async def apply_preemptibly(self, dispatched: Dispatched) -> torch.Tensor:
        """[R, D] the same bits, with preemption points between groups of experts."""
        groups = grouped(dispatched.expert_counts, PIECE_ROWS)
        if len(groups) < 2:
            return self.apply(dispatched)
        y_RD = torch.empty_like(dispatched.rows_RD)
        first = 0
        for group in groups:
            counts = dispatched.expert_counts[group]
            rows = slice(first, first + sum(counts))
            y_RD[rows] = apply_experts(self.experts[group], dispatched.rows_RD[rows], counts)
            first = rows.stop
            if first < len(y_RD):
                await preemption_point()
        return y_RD

    def total(
        self, h_TD: torch.Tensor, y_TKD: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] the outputs weighted in float32 and summed in slot order, the shared one last."""
        if self.shared is None and kernels.can_read(y_TKD):
            return _mix(y_TKD, weight_TK)
        total = weighted_sum(y_TKD, weight_TK)
        if self.shared is not None:
            shared_TD = self.shared(h_TD).float()
            if self.shared_gate is not None:
                shared_TD = shared_TD * padded_sigmoid(self.shared_gate(h_TD))[:, :1]
            total = total + shared_TD
        return total.to(h_TD.dtype)


def apply_all(experts: Sequence[Expert], x_ND: torch.Tensor) -> torch.Tensor:
    """[X, N, D] every expert applied to every row, to the bits of `apply_experts`."""
    y_XND = x_ND.new_empty((len(experts), *x_ND.shape))
    for y_ND, expert in zip(y_XND.unbind(), experts, strict=True):
        y_ND.copy_(expert(x_ND))
    return y_XND


def grouped(counts: Sequence[int], least: int) -> list[slice]:
    """Neighbours in groups of at least `least` in sum, the last group perhaps less."""
    groups, first, total = [], 0, 0
    for place, count in enumerate(counts, start=1):
        total += count
        if total >= least or place == len(counts):
            groups.append(slice(first, place))
            first, total = place, 0
    return groups


def weighted_sum(y_TKD: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32"""
    weighted = y_TKD * weight_TK[:, :, None]
    total = weighted[:, 0]
    for slot in range(1, y_TKD.shape[1]):
        total = total + weighted[:, slot]
    return total


def _mix(y_TKD: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """`weighted_sum`, rounded to the outputs' type, to the bit."""
    num_rows, top_k, width = y_TKD.shape
    y_TKD, weight_TK = y_TKD.contiguous(), weight_TK.contiguous()
    out_TD = y_TKD.new_empty((num_rows, width))
    kernels.native.mix(
        y_TKD.element_size(),
        out_TD.data_ptr(),
        y_TKD.data_ptr(),
        weight_TK.data_ptr(),
        num_rows,
        top_k,
        width,
    )
    return out_TD
