"""Which experts a row goes to, and with what weight.

Shapes: T rows, X experts, K experts a row goes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The chosen experts of every row, most likely first."""

    topk_TK: torch.Tensor
    """int64 expert ids; among equals the lowest id comes first."""
    weight_TK: torch.Tensor
    """float32 weights of their outputs."""


def route(logits_TX: torch.Tensor, *, top_k: int, norm_topk: bool) -> Routing:
    """Softmax in float32, the `top_k` largest, scaled to sum to one with `norm_topk`."""
    probability_TX = torch.softmax(logits_TX, dim=-1, dtype=torch.float32)
    sorted_TX, expert_TX = torch.sort(probability_TX, dim=-1, descending=True, stable=True)
    weight_TK = sorted_TX[:, :top_k]
    if norm_topk:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return Routing(topk_TK=expert_TX[:, :top_k].contiguous(), weight_TK=weight_TK)
