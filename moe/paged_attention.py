"""Attention by our own kernels, over the pages of a cache.

Shapes: T rows, H query heads, G key/value heads, A = H + G heads that are rotated, E head width,
X = (H + 2 G) * E.
"""

from __future__ import annotations

import torch

from . import kernels
from .batch import Batch
from .pages import Pages


def turn_heads(
    qkv_TX: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    pages: Pages,
    layer: int,
    batch: Batch,
    *,
    norm_AE: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """[T, H, E] queries normalised and rotated; keys too, put with the values into their pages.

    A row holds its query heads, key heads and value heads. Every number is computed in float32 and
    rounded once. No norm weights: heads are not normalised.
    """
    num_rows, width = qkv_TX.shape[0], pages.width
    num_heads = qkv_TX.shape[1] // width - 2 * pages.num_heads
    cos_T1E, sin_T1E = rotation
    q_THE = qkv_TX.new_empty((num_rows, num_heads, width))
    kernels.native.turn_heads(
        qkv_TX.element_size(),
        q_THE.data_ptr(),
        qkv_TX.data_ptr(),
        qkv_TX.stride(0),
        0 if norm_AE is None else norm_AE.data_ptr(),
        cos_T1E.data_ptr(),
        sin_T1E.data_ptr(),
        batch.slot_mapping.data_ptr(),
        pages.address(layer),
        num_rows,
        num_heads,
        pages.num_heads,
        width,
        eps,
    )
    return q_THE


def paged_attention(
    q_THE: torch.Tensor, pages: Pages, layer: int, batch: Batch, *, scale: float
) -> torch.Tensor:
    """[T, H, E] softmax(q k * scale) v over every row's own and earlier positions.

    The same function as `attention.block_attention`, its slow reference here. The order of a row's
    sums depends on its position alone: block by block, each beside a running maximum and total.
    """
    out_THE = torch.empty_like(q_THE)
    kernels.native.attend(
        q_THE.element_size(),
        out_THE.data_ptr(),
        q_THE.data_ptr(),
        pages.address(layer),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.cu_seqlens_q.data_ptr(),
        batch.positions.data_ptr(),
        len(batch.context_lens),
        q_THE.shape[1],
        pages.num_heads,
        pages.width,
        scale,
    )
    return out_THE
