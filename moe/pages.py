"""Keys and values in the order in which our kernels read them, page by page.

A page holds one block of 64 positions of one key/value head: its keys as a packed weight with a
position for each output, then its values as one with a position for each input. Attention is then
two products per page (`native/attention.h`).

Shapes: L layers, B blocks, G key/value heads, E head width, P = 128 * E elements of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from . import kernels
from .arena import Arena

PAGE_POSITIONS = 64
"""The kernels' own; a block of the cache has as many."""
WIDTH_MULTIPLE = 16
"""Heads are read sixteen elements at a time."""
MAX_WIDTH = 512
"""Elements of half a page must have 16-bit numbers."""
_NUMBERS = {2: torch.int16, 4: torch.int32}
"""What numbers an element of so many bytes."""


def have_pages(planes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: str) -> bool:
    """Whether a layer that keeps these planes can have pages: keys and values of equal heads."""
    if set(planes) != {"key", "value"} or planes["key"] != planes["value"]:
        return False
    width = planes["key"][1]
    fits = width % WIDTH_MULTIPLE == 0 and width <= MAX_WIDTH
    return fits and kernels.usable(dtype, torch.device(device))


class Pages:
    """All pages of a pool, zero at first, and how their elements lie."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_heads = num_heads
        self.width = width
        shape = (num_layers, num_blocks, num_heads, 2 * PAGE_POSITIONS * width)
        memory = Arena().take(dtype.itemsize * math.prod(shape))
        self.pool = memory.view(dtype).view(shape)
        """[L, B, G, P]"""
        keys = _places(dtype, outputs=PAGE_POSITIONS, inputs=width, strides=(width, 1))
        values = _places(dtype, outputs=width, inputs=PAGE_POSITIONS, strides=(1, width))
        self.places = {"key": keys, "value": values + PAGE_POSITIONS * width}
        """[64, E] where in a page each plane's elements lie."""

    def address(self, layer: int) -> int:
        """Where a layer's pages begin."""
        return self.pool.data_ptr() + layer * self.pool.stride(0) * self.pool.element_size()

    def check(self, tables: torch.Tensor) -> None:
        """Raises ValueError where a table names a block that is not in the pool."""
        if not tables.numel():
            return
        num_blocks = self.num_blocks
        low, high = (int(block) for block in tables.aminmax())
        if low < 0 or high >= num_blocks:
            raise ValueError(
                f"a block table names block {low if low < 0 else high}, the cache has {num_blocks}"
            )

    def plane(self, name: str, pages: torch.Tensor) -> torch.Tensor:
        """[..., 64, E] a plane of some pages [..., P]; a copy."""
        found: torch.Tensor = pages[..., self.places[name]]
        return found

    def filled(self, planes: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[..., P] pages that have these planes [..., 64, E]."""
        shape = (*planes["key"].shape[:-2], self.pool.shape[-1])
        pages = torch.empty(shape, dtype=self.pool.dtype)
        for name, plane in planes.items():
            pages[..., self.places[name]] = plane
        return pages


def _places(
    dtype: torch.dtype, *, outputs: int, inputs: int, strides: tuple[int, int]
) -> torch.Tensor:
    """[64, E] where packing puts a weight's elements, which lie at these strides in [64, E]."""
    size = dtype.itemsize
    numbers = torch.arange(outputs * inputs, dtype=torch.int32).to(_NUMBERS[size])
    packed = torch.empty_like(numbers)
    kernels.native.pack(size, packed.data_ptr(), numbers.data_ptr(), outputs, inputs, *strides)
    places: torch.Tensor = (packed.to(torch.int64) & (2 ** (8 * size) - 1)).argsort()
    return places.view(PAGE_POSITIONS, -1)
