"""Grouped-query attention, from rows to heads.

Shapes: T rows, U this rank's share of them, D hidden, H query heads and G key/value heads of this
rank, A = H + G heads that are rotated, E head width, X what is gathered of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .attention import block_attention
from .batch import Batch
from .context import PathContext
from .linear import Linear
from .paged_attention import paged_attention, turn_heads
from .parts import GroupedQuery
from .rotary import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """One layer's projections on one tensor-parallel rank, and the arithmetic with them."""

    sizes: GroupedQuery
    rms_eps: float
    qkv: Linear
    """This rank's query heads, then its key heads, then its value heads; all heads when rows are
    normalised whole."""
    bias: torch.Tensor | None
    """Of `qkv`'s outputs."""
    head_norm_AE: torch.Tensor | None
    """Norm weights of this rank's query and key heads; None: heads are not normalised."""
    row_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Norm weights over all query heads and over all key heads; None: rows are not normalised."""

    def own_rows(self, h_UD: torch.Tensor) -> torch.Tensor:
        """[U, X] what the heads of all ranks need of this rank's rows.

        A norm over all heads needs the whole row, so it is taken here, before heads are split.
        """
        if self.row_norms is None:
            return h_UD
        *queries_and_keys, value = self._split(self._project(h_UD))
        normalised = [
            F.rms_norm(x.float(), weight.shape, weight, self.rms_eps).to(value.dtype)
            for x, weight in zip(queries_and_keys, self.row_norms, strict=True)
        ]
        return torch.cat((*normalised, value), dim=1)

    def queries(
        self,
        context: PathContext,
        batch: Batch,
        index: int,
        rows_TX: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[real T, H, E]; writes the rows' keys and values. Padding rows stop here."""
        width = self.sizes.head_dim
        num_kv_heads = self.sizes.num_kv_heads // context.tp_size
        qkv = self._own_heads(rows_TX, context) if self.row_norms else self._project(rows_TX)
        if context.kv.pages is not None:
            return turn_heads(
                qkv[: batch.num_rows],
                rotation,
                context.kv.pages,
                index,
                batch,
                norm_AE=self.head_norm_AE,
                eps=self.rms_eps,
            )
        qkv = qkv[: batch.num_rows].unflatten(1, (-1, width))
        qk_TAE, value_TGE = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        qk_TAE = qk_TAE.float()
        if self.head_norm_AE is not None:
            qk_TAE = F.rms_norm(qk_TAE, (width,), None, self.rms_eps) * self.head_norm_AE
        qk_TAE = rotate(qk_TAE, *rotation).to(value_TGE.dtype)
        context.kv.write(index, batch.slot_mapping, key=qk_TAE[:, -num_kv_heads:], value=value_TGE)
        return qk_TAE[:, :-num_kv_heads]

    def attend(
        self,
        context: PathContext,
        batch: Batch,
        index: int,
        q_THE: torch.Tensor,
    ) -> torch.Tensor:
        """[real T, H * E]"""
        scale = self.sizes.scale
        if context.kv.pages is not None:
            return paged_attention(q_THE, context.kv.pages, index, batch, scale=scale).flatten(1)
        key, value = context.kv.plane(index, "key"), context.kv.plane(index, "value")
        return block_attention(q_THE, (key,), value, batch, scale=scale).flatten(1)

    def _project(self, h_UD: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(h_UD)
        return qkv if self.bias is None else qkv + self.bias

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All queries, keys and values of the rows."""
        kv = self.sizes.num_kv_heads * self.sizes.head_dim
        parts: tuple[torch.Tensor, ...] = qkv.split((qkv.shape[1] - 2 * kv, kv, kv), dim=1)
        return parts

    def _own_heads(self, qkv: torch.Tensor, context: PathContext) -> torch.Tensor:
        if context.tp_size == 1:
            return qkv
        parts = [x.chunk(context.tp_size, dim=1)[context.tp_rank] for x in self._split(qkv)]
        return torch.cat(parts, dim=1)
