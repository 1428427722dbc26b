"""Causal attention whose bits depend neither on chunking nor on the rest of the batch.

Every reduction has a fixed shape: scores and weighted values are summed inside 64-position blocks
that lie at absolute positions, and the blocks are summed pairwise in a tree over their absolute
index, padded with zeros to a power of two (adding zero is exact, so other lengths do not matter).

Shapes: T rows, H query heads, G key/value heads, M = H / G, E width of queries and keys, V width of
values, B blocks of the pool, N tiles, Q rows of a tile, P (tile, block) pairs, K = 64 positions of
a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .batch import Batch, TileGroup
from .kv_cache import BLOCK_SIZE

MIN_PRODUCT_ROWS = {torch.float32: 16}
"""A type's products with fewer query rows sum in another order. Measured: up to 3 rows on an EPYC
of 2024, up to 15 on a Xeon of 2023 where queries are wider than 320; bfloat16: none."""


def block_attention(
    q_THE: torch.Tensor,
    keys_BGKE: Sequence[torch.Tensor],
    value_BGKV: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
) -> torch.Tensor:
    """[T, H, V] softmax(q k * scale) v over every row's own and earlier positions.

    A key is what lies in the planes `keys_BGKE`, side by side. The rows' own keys and values must
    already be written. Memory beyond the result is bounded by the tile groups of `batch`, however
    long the contexts are.
    """
    out_THV = q_THE.new_empty((*q_THE.shape[:2], value_BGKV.shape[3]))
    for group in batch.tiles:
        attended = _attend(q_THE, keys_BGKE, value_BGKV, group, scale)
        if group.keep_R is None and attended.shape[0] == q_THE.shape[0]:
            return attended
        rows = group.row_M if group.keep_R is None else group.row_M[group.keep_R]
        out_THV[rows] = attended if group.keep_R is None else attended[group.keep_R]
    return out_THV


def _attend(
    q_THE: torch.Tensor,
    keys_BGKE: Sequence[torch.Tensor],
    value_BGKV: torch.Tensor,
    group: TileGroup,
    scale: float,
) -> torch.Tensor:
    num_heads, width = q_THE.shape[1:]
    num_groups, value_width = value_BGKV.shape[1], value_BGKV.shape[3]
    heads_per_group = num_heads // num_groups
    num_tiles, tile_rows, num_pairs = group.num_tiles, group.tile_rows, len(group.tile_P)

    q = q_THE.index_select(0, group.row_M)
    q = q.view(num_tiles, tile_rows, num_groups, heads_per_group, width).transpose(1, 2)
    padding = -(-MIN_PRODUCT_ROWS.get(q.dtype, 1) // tile_rows) - heads_per_group
    if padding > 0:
        q = F.pad(q, (0, 0, 0, padding))
    members = q.shape[3]
    q_PGRE = q.index_select(0, group.tile_P)  # R = Q * M query rows per head of the cache
    parts = [plane.index_select(0, group.block_P) for plane in keys_BGKE]
    key_PGKE = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    value_PGKV = value_BGKV.index_select(0, group.block_P)

    batch, rows = num_pairs * num_groups, tile_rows * members
    score = torch.bmm(
        q_PGRE.reshape(batch, rows, width), key_PGKE.view(batch, BLOCK_SIZE, width).transpose(1, 2)
    ).view(num_pairs, num_groups, tile_rows, members, BLOCK_SIZE)
    score = torch.add(group.mask_PQK[:, None, :, None], score, alpha=scale)
    highest = _highest(score.amax(-1), group)
    weight = score.sub_(highest.unsqueeze(-1)).exp_()
    total = weight.sum(-1)
    mixed = torch.bmm(
        weight.to(q_THE.dtype).view(batch, rows, BLOCK_SIZE),
        value_PGKV.view(batch, BLOCK_SIZE, value_width),
    )
    both = torch.cat(
        (mixed.view(*total.shape, value_width), total.unsqueeze(-1)),
        dim=-1,  # one tree sums both; bfloat16 products become float32 here
    )
    summed = _tree_sum(both, group)[..., :heads_per_group, :]
    out = summed[..., :value_width] / summed[..., value_width:]
    out_NGQM = out.transpose(1, 2)
    return out_NGQM.reshape(num_tiles * tile_rows, num_heads, value_width).to(q_THE.dtype)


def _highest(highest_P: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Each pair's row maximum over all blocks of its tile. Maxima do not depend on order."""
    if group.num_slots == 1:
        return highest_P
    shape = highest_P.shape[1:]
    slots = highest_P.new_full((group.num_tiles * group.num_slots, *shape), float("-inf"))
    slots.index_copy_(0, group.slot_P, highest_P)
    return (
        slots.view(group.num_tiles, group.num_slots, *shape).amax(1).index_select(0, group.tile_P)
    )


def _tree_sum(parts_P: torch.Tensor, group: TileGroup) -> torch.Tensor:
    """Sum of every tile's pairs, neighbours first, over the absolute block index."""
    shape = parts_P.shape[1:]
    if len(parts_P) == group.num_tiles * group.num_slots:
        level = parts_P
    else:
        level = parts_P.new_zeros((group.num_tiles * group.num_slots, *shape))
        level.index_copy_(0, group.slot_P, parts_P)
    level = level.view(group.num_tiles, group.num_slots, *shape)
    while level.shape[1] > 1:
        level = level[:, 0::2] + level[:, 1::2]
    return level.squeeze(1)


def reference_attention(
    q_THE: torch.Tensor,
    key_SGE: torch.Tensor,
    value_SGV: torch.Tensor,
    position_T: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The same function of one sequence, obvious and slow: float64, row by row, no blocks.

    `key_SGE` and `value_SGV` hold positions 0, 1, ... of the sequence.
    """
    out = torch.empty((*q_THE.shape[:2], value_SGV.shape[2]), dtype=torch.float64)
    members = q_THE.shape[1] // key_SGE.shape[1]
    for row, position in enumerate(position_T.tolist()):
        for head in range(q_THE.shape[1]):
            key = key_SGE[: position + 1, head // members].double()
            value = value_SGV[: position + 1, head // members].double()
            score = key @ q_THE[row, head].double() * scale
            out[row, head] = torch.softmax(score, 0) @ value
    return out
