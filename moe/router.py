"""Which experts a row goes to, and with what weight.

Shapes: T rows, X experts, N groups of experts, K experts a row goes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import kernels
from .parts import Router

WIDTH_MULTIPLE = 32
"""sigmoid's bits depend on the number of rows when their width is no multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The chosen experts of every row, most likely first."""

    topk_TK: torch.Tensor
    """int64 expert ids; among equals the lowest id comes first."""
    weight_TK: torch.Tensor
    """float32 weights of their outputs."""


def route(logits_TX: torch.Tensor, router: Router, bias_X: torch.Tensor | None = None) -> Routing:
    """The `top_k` best experts of the best groups, by score plus bias; weights are scores alone.

    Scores are float32. Our own kernel does what has neither sigmoid nor bias nor groups; for all
    else, and elsewhere, `route_in_torch` is taken.
    """
    if not is_plain(router, bias_X) or not kernels.usable(logits_TX.dtype, logits_TX.device):
        return route_in_torch(logits_TX, router, bias_X)
    num_rows, num_experts = logits_TX.shape
    logits_TX = logits_TX.contiguous()
    topk_TK = torch.empty((num_rows, router.top_k), dtype=torch.int64)
    weight_TK = torch.empty((num_rows, router.top_k), dtype=torch.float32)
    kernels.native.choose(
        logits_TX.element_size(),
        topk_TK.data_ptr(),
        weight_TK.data_ptr(),
        logits_TX.data_ptr(),
        num_experts,
        num_rows,
        num_experts,
        router.top_k,
        router.normalise,
        router.scale,
    )
    return Routing(topk_TK=topk_TK, weight_TK=weight_TK)


def is_plain(router: Router, bias_X: torch.Tensor | None) -> bool:
    """Whether it is what our own kernel does: neither sigmoid nor bias nor groups."""
    return router.score == "softmax" and router.top_groups == router.num_groups and bias_X is None


def route_in_torch(
    logits_TX: torch.Tensor, router: Router, bias_X: torch.Tensor | None = None
) -> Routing:
    """`route` for every router there is, operation by operation.

    DeepSeek-V3's router (https://arxiv.org/abs/2412.19437, section 2.1.2) has a
    bias and groups, most have neither.
    """
    if router.score == "softmax":
        score_TX = torch.softmax(logits_TX, dim=-1, dtype=torch.float32)
    else:
        score_TX = padded_sigmoid(logits_TX)
    choice_TX = score_TX if bias_X is None else score_TX + bias_X
    if router.top_groups < router.num_groups:
        choice_TX = choice_TX.masked_fill(~_in_best_groups(choice_TX, router), float("-inf"))
    sorted_TX, expert_TX = torch.sort(choice_TX, dim=-1, descending=True, stable=True)
    topk_TK = expert_TX[:, : router.top_k].contiguous()
    weight_TK = sorted_TX[:, : router.top_k] if bias_X is None else score_TX.gather(1, topk_TK)
    if router.normalise:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    if router.scale != 1:
        weight_TK = weight_TK * router.scale
    return Routing(topk_TK=topk_TK, weight_TK=weight_TK)


def padded_sigmoid(x_TX: torch.Tensor) -> torch.Tensor:
    """float32 sigmoid whose row bits do not depend on the number of rows."""
    width = x_TX.shape[1]
    return torch.sigmoid(F.pad(x_TX.float(), (0, -width % WIDTH_MULTIPLE)))[:, :width]


def _in_best_groups(choice_TX: torch.Tensor, router: Router) -> torch.Tensor:
    """[T, X] whether an expert's group is one of the best; among equals the lowest is."""
    choice_TNE = choice_TX.unflatten(1, (router.num_groups, -1))
    if router.group_score == "best":
        group_TN = choice_TNE.amax(-1)
    else:
        group_TN = choice_TNE.topk(2, dim=-1).values.sum(-1)
    best = torch.sort(group_TN, dim=-1, descending=True, stable=True).indices
    kept_TN = torch.zeros_like(group_TN, dtype=torch.bool)
    kept_TN.scatter_(1, best[:, : router.top_groups], True)
    return kept_TN.repeat_interleave(choice_TNE.shape[2], dim=1)
