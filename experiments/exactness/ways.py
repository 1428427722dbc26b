"""Ways to compute a part of a layer: torch's, which keep no bits, and our own.

Shapes: B sequences, T rows of each, R = B * T rows, D hidden, H query heads, G key/value heads,
M = H / G, E head width, L positions, I width of an expert, X experts, K top-k, N inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from interlace.moe.dispatch import Returned, deal
from interlace.moe.experts import apply_experts
from interlace.moe.linear import Linear, can_pack
from interlace.moe.mixture import MixtureLayer
from interlace.moe.router import Routing

Product = Callable[[torch.Tensor], torch.Tensor]

OWN = "own"
"""Our exact kernel and our order, which who need not be exact may use too."""
ARRIVAL = "own, as they come"
"""Our kernel; experts' outputs are added up in the order in which they arise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Which way is taken for what."""

    products: str = OWN
    head: str = OWN
    attention: str = OWN
    experts: str = OWN

    @property
    def fused(self) -> bool:
        """Whether our one call for all up to the experts serves."""
        return self.products == self.attention == OWN


def products_of(weight_ON: torch.Tensor, own: Linear | None = None) -> dict[str, Product]:
    """By name; all give ``x @ weight.T``."""
    found: dict[str, Product] = {} if own is None else {OWN: own}
    found["F.linear"] = lambda x: F.linear(x, weight_ON)
    if can_pack(weight_ON):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_ON.contiguous())
        found["oneDNN packed"] = lambda x: torch.ops.mkldnn._linear_pointwise(
            x, packed, None, "none", [], ""
        )
    return found


# ---- attention over a cache that lies in one piece for each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """Queries of some rows and what they look at; they are the last positions of it."""

    q_BTHE: torch.Tensor
    key_BGLE: torch.Tensor
    value_BGLE: torch.Tensor
    scale: float

    @property
    def members(self) -> int:
        return self.q_BTHE.shape[2] // self.key_BGLE.shape[1]

    def mask(self) -> torch.Tensor | None:
        """[T, L] where a row may look; None: everywhere."""
        rows, length = self.q_BTHE.shape[1], self.key_BGLE.shape[2]
        if rows == 1:
            return None
        return torch.ones(rows, length, dtype=torch.bool).tril(length - rows)


def sdpa(work: Attended) -> torch.Tensor:
    whole = work.q_BTHE.shape[1] == work.key_BGLE.shape[2]
    out_BHTE = F.scaled_dot_product_attention(
        work.q_BTHE.transpose(1, 2),
        work.key_BGLE,
        work.value_BGLE,
        attn_mask=None if whole else work.mask(),
        is_causal=whole,
        scale=work.scale,
        enable_gqa=True,
    )
    return out_BHTE.transpose(1, 2)


def sdpa_repeated(work: Attended) -> torch.Tensor:
    """Keys and values copied for every query head."""
    whole = work.q_BTHE.shape[1] == work.key_BGLE.shape[2]
    out_BHTE = F.scaled_dot_product_attention(
        work.q_BTHE.transpose(1, 2),
        work.key_BGLE.repeat_interleave(work.members, 1),
        work.value_BGLE.repeat_interleave(work.members, 1),
        attn_mask=None if whole else work.mask(),
        is_causal=whole,
        scale=work.scale,
    )
    return out_BHTE.transpose(1, 2)


def sdpa_grouped(work: Attended) -> torch.Tensor:
    """Query heads of a group as rows; one row of each sequence."""
    num_groups = work.key_BGLE.shape[1]
    q_BGME = work.q_BTHE[:, 0].unflatten(1, (num_groups, work.members))
    out_BGME = F.scaled_dot_product_attention(
        q_BGME, work.key_BGLE, work.value_BGLE, scale=work.scale
    )
    return out_BGME.flatten(1, 2)[:, None]


def products_grouped(work: Attended) -> torch.Tensor:
    """Two batched products with the query heads of a group as rows."""
    num_groups, rows = work.key_BGLE.shape[1], work.q_BTHE.shape[1]
    q_BGTME = work.q_BTHE.unflatten(2, (num_groups, work.members)).transpose(1, 2)
    score = (q_BGTME.flatten(2, 3) @ work.key_BGLE.transpose(2, 3)).float().mul_(work.scale)
    score_BGTML = score.unflatten(2, (rows, work.members))
    mask = work.mask()
    if mask is not None:
        score_BGTML = score_BGTML.masked_fill(~mask[:, None], float("-inf"))
    weight = torch.softmax(score_BGTML, -1).to(work.q_BTHE.dtype).flatten(2, 3)
    out_BGTME = (weight @ work.value_BGLE).unflatten(2, (rows, work.members))
    out_BTHE: torch.Tensor = out_BGTME.transpose(1, 2).flatten(2, 3)
    return out_BTHE


Attention = Callable[[Attended], torch.Tensor]


def attentions(rows: int) -> dict[str, Attention]:
    """[B, T, H, E], by name."""
    found: dict[str, Attention] = {
        "SDPA": sdpa,
        "SDPA, heads repeated": sdpa_repeated,
        "two products": products_grouped,
    }
    if rows == 1:
        found["SDPA, groups as rows"] = sdpa_grouped
    return found


# ---- experts


class LooseExperts:
    """One layer's, each way that there is."""

    def __init__(
        self, gates: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], own: MixtureLayer
    ) -> None:
        """`gates` have the gate's rows first, then those of the other half."""
        self._own = own
        self._gates = [products_of(gate) for gate in gates]
        self._downs = [products_of(down) for down in downs]

    def names(self) -> list[str]:
        return [OWN, ARRIVAL, *self._gates[0]]

    def __call__(self, name: str, h_RD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[R, D]"""
        top_k = routing.topk_TK.shape[1]
        rows, place_TK, counts_X = deal(h_RD, routing.topk_TK, len(self._own.experts))
        counts = counts_X.tolist()
        if name in (OWN, ARRIVAL):
            y = apply_experts(self._own.experts, rows, counts)
        else:
            y = torch.cat([self._one(name, i, x) for i, x in enumerate(rows.split(counts))])
        if name == OWN:
            returned = Returned(outputs_ND=y, place_TK=place_TK)
            return self._own.total(h_RD, returned, routing.weight_TK)
        order = torch.empty(place_TK.numel(), dtype=torch.int64)
        order[place_TK.flatten()] = torch.arange(len(order))
        weighted = y * routing.weight_TK.flatten()[order, None]
        out = torch.zeros_like(h_RD, dtype=torch.float32)
        return out.index_add_(0, order // top_k, weighted).to(h_RD.dtype)

    def _one(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x
        gate, up = self._gates[expert][name](x).chunk(2, -1)
        return self._downs[expert][name](F.silu(gate).mul_(up))
