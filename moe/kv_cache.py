"""Keys and values of all sequences, in blocks of 64 positions.

Shapes: T rows, B blocks, G heads of a plane, E width of one head's entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .config import ModelConfig, check_tp_size
from .pages import Pages, have_pages
from .parts import GroupedQuery, Latent
from .to_device import to_device

BLOCK_SIZE = 64
"""Positions in one block. Attention sums inside blocks first, so this is part of the numerics."""

Planes = Mapping[str, tuple[int, int]]
"""What one layer keeps per token: name of each plane -> (heads, width)."""


def attention_planes(config: ModelConfig, tp_size: int = 1) -> Planes:
    """The planes of the model's attention on one of `tp_size` tensor-parallel ranks.

    Keys and values are split by heads. Latents belong to all heads, so every rank has them whole.
    ValueError if `tp_size` does not divide the heads.
    """
    check_tp_size(config, tp_size)
    match config.attention:
        case GroupedQuery(num_kv_heads=num_kv_heads, head_dim=width):
            return dict.fromkeys(("key", "value"), (num_kv_heads // tp_size, width))
        case Latent(latent_dim=latent_dim, rope_dim=rope_dim):
            return {"latent": (1, latent_dim), "rope": (1, rope_dim)}


def bytes_per_block(config: ModelConfig, dtype: torch.dtype, tp_size: int = 1) -> int:
    """Memory of one block over all layers and planes, in bytes."""
    per_token = sum(heads * width for heads, width in attention_planes(config, tp_size).values())
    return config.num_layers * BLOCK_SIZE * per_token * dtype.itemsize


class KVCache:
    """A fixed pool of blocks. Every layer is a list of named planes, each laid out head-major.

    Where our own kernels attend, keys and values lie in `pages` instead, and planes are copies.
    What leaves a cache or enters it is laid out in planes either way.

    The pool is shared by all paths of a rank; who may touch which block is the block manager's
    business. Blocks are zero until written, and what lies beyond a sequence's last position is
    never read as a number that counts.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        planes: Planes,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = torch.device(device)
        self._planes = dict(planes)
        self.pages: Pages | None = None
        if have_pages(planes, dtype, str(device)):
            num_heads, width = planes["key"]
            self.pages = Pages(
                num_layers=num_layers,
                num_blocks=num_blocks,
                num_heads=num_heads,
                width=width,
                dtype=dtype,
            )
            self._pools = {"pages": self.pages.pool}
            return
        self._pools = {
            name: torch.zeros(
                (num_layers, num_blocks, heads, BLOCK_SIZE, width), dtype=dtype, device=device
            )
            for name, (heads, width) in planes.items()
        }

    def plane(self, layer: int, name: str) -> torch.Tensor:
        """[B, G, 64, E]: a view of the pool, or a copy where there are pages."""
        return self._plane(name, layer)

    def write(self, layer: int, slot_mapping_T: torch.Tensor, **planes: torch.Tensor) -> None:
        """Store T rows [T, G, E] of each named plane at slots ``block * 64 + offset``."""
        block_T = slot_mapping_T >> 6
        offset_T = slot_mapping_T & (BLOCK_SIZE - 1)
        for name, rows_TGE in planes.items():
            if self.pages is None:
                self._pools[name][layer].transpose(1, 2)[block_T, offset_T] = rows_TGE
                continue
            place_T1E = self.pages.places[name][offset_T][:, None]
            head_G1 = torch.arange(rows_TGE.shape[1])[:, None]
            self.pages.pool[layer][block_T[:, None, None], head_G1, place_T1E] = rows_TGE

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in all layers, as if one after another in this order."""
        if not pairs:
            return
        if self.device.type == "cpu":  # a slice is copied at once, what is indexed number by number
            for source, target in pairs:
                for pool in self._pools.values():
                    pool[:, target] = pool[:, source]
            return
        sources, targets = zip(*pairs, strict=True)
        independent = not set(sources) & set(targets) and len(set(targets)) == len(targets)
        steps = [(sources, targets)] if independent else [((a,), (b,)) for a, b in pairs]
        for step in steps:
            source, target = to_device(np.array(step, dtype=np.int64), self.device)
            for pool in self._pools.values():
                pool[:, target] = pool[:, source]

    @property
    def block_bytes(self) -> int:
        """Of one block over all layers and planes."""
        return sum(pool.nbytes // self.num_blocks for pool in self._pools.values())

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """[N, block_bytes] uint8: copies of whole blocks over all layers and planes."""
        num, chosen = len(blocks), list(blocks)
        parts = []
        for name, (heads, width) in self._planes.items():
            of_block = self._plane(name, (slice(None), chosen)).transpose(0, 1).contiguous()
            numbers = self.num_layers * heads * BLOCK_SIZE * width
            parts.append(of_block.view(num, numbers).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def write_blocks(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Put what `read_blocks` of a cache with the same planes gave into these blocks."""
        num, chosen = len(blocks), list(blocks)
        sizes = [heads * BLOCK_SIZE * width for heads, width in self._planes.values()]
        widths = [self.num_layers * size * self.dtype.itemsize for size in sizes]
        planes = {}
        for (name, (heads, width)), part in zip(
            self._planes.items(), rows.split(widths, dim=1), strict=True
        ):
            values = part.contiguous().view(self.dtype)
            shape = (num, self.num_layers, heads, BLOCK_SIZE, width)
            planes[name] = values.view(shape).transpose(0, 1)
        if self.pages is not None:
            self.pages.pool[:, chosen] = self.pages.filled(planes)
            return
        for name, values in planes.items():
            self._pools[name][:, chosen] = values

    def _plane(self, name: str, index: Any) -> torch.Tensor:
        """A plane of what `index` chooses from layers and blocks."""
        if self.pages is None:
            return self._pools[name][index]
        return self.pages.plane(name, self.pages.pool[index])
