"""Matrix products whose row bits do not depend on how many rows there are.

Shapes: T rows, K inputs, N outputs, H heads.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from . import kernels
from .arena import Arena

ROW_MULTIPLE = 16
"""Rows are rounded up to this where the kernel depends on their number."""
PRODUCT_ROWS = 64
"""Rows of one product on an accelerator, whose library chooses its kernel by their number."""


def keep_to_row_stable_kernels() -> None:
    """Keep oneDNN from matrix tiles (AMX), unless the environment says otherwise.

    Its kernels for them cut a sum by the number of rows; those for AVX-512 treat every row alike
    (measured on a Xeon of 2023). It must come before oneDNN's first product in this process; the
    self-test tells where it came too late.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class Linear:
    """``x_TK @ weight_NK.T``: equal rows in give bit-equal rows out, whatever else is in the batch.

    On a CPU weights are packed once for our own kernels (`kernels`). Where those were not built,
    bfloat16 ones are packed into oneDNN's blocked layout, whose kernels treat every row alike too;
    otherwise the rows are rounded up to a multiple of 16 in one product: kernels for one to seven
    rows sum in another order.
    One thread is assumed; with more, a product may be cut along its rows. On an accelerator every
    product has 64 rows, so it is always the same kernel.
    """

    __slots__ = ("_own", "_packed", "_weight", "num_outputs")

    def __init__(self, weight_NK: torch.Tensor, arena: Arena | None = None) -> None:
        """Takes the weight over; when it is packed (into `arena`), the original is not kept."""
        self.num_outputs: int = weight_NK.shape[0]
        keep_to_row_stable_kernels()
        self._own: kernels.PackedWeight | None = None
        self._packed = False
        if kernels.can_pack(weight_NK):
            self._own = kernels.PackedWeight(weight_NK, arena)
            return
        self._packed = can_pack(weight_NK)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous())
            if self._packed
            else weight_NK.contiguous()
        )

    @property
    def own(self) -> kernels.PackedWeight | None:
        """The weight as our own kernels read it, where they do."""
        return self._own

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            return self._own(x_TK)
        num_rows = x_TK.shape[0]
        if num_rows == 0:
            return x_TK.new_empty((0, self.num_outputs))
        if self._packed:
            if num_rows == 1:  # alone it would be summed otherwise where K and N are large
                x_TK = F.pad(x_TK, (0, 0, 0, 1))
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x_TK, self._weight, None, "none", [], ""
            )
            return packed[:num_rows]
        if x_TK.device.type != "cpu":
            return tiled_linear(x_TK, self._weight)
        return padded_linear(x_TK, self._weight)


def can_pack(weight_NK: torch.Tensor) -> bool:
    """Whether oneDNN takes this weight: bfloat16, on a CPU that has bfloat16 arithmetic."""
    return (
        weight_NK.dtype == torch.bfloat16
        and weight_NK.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def padded_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """`F.linear` on T rounded up to a multiple of `ROW_MULTIPLE`, cut back to T."""
    num_rows = x_TK.shape[0]
    padding = -num_rows % ROW_MULTIPLE
    if padding:
        x_TK = F.pad(x_TK, (0, 0, 0, padding))
    return F.linear(x_TK.contiguous(), weight_NK)[:num_rows]


def tiled_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """`F.linear` in products of `PRODUCT_ROWS` rows each, the last one filled with zeros."""
    num_rows = x_TK.shape[0]
    padding = -num_rows % PRODUCT_ROWS
    if padding:
        x_TK = F.pad(x_TK, (0, 0, 0, padding))
    tiles = [F.linear(tile, weight_NK) for tile in x_TK.contiguous().split(PRODUCT_ROWS)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:num_rows]


class HeadwiseLinear:
    """``x_THK -> y_THN``, every head with a weight of its own; the same promise as `Linear`."""

    __slots__ = ("_own", "_weight_HKN")

    def __init__(self, weight_HNK: torch.Tensor) -> None:
        keep_to_row_stable_kernels()
        self._own: kernels.PackedHeads | None = None
        if len(weight_HNK) and kernels.can_pack(weight_HNK[0]):
            self._own = kernels.PackedHeads(weight_HNK)
            return
        self._weight_HKN = weight_HNK.transpose(1, 2).contiguous()

    def __call__(self, x_THK: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            return self._own(x_THK)
        num_rows, on_cpu = x_THK.shape[0], x_THK.device.type == "cpu"
        padding = -num_rows % (ROW_MULTIPLE if on_cpu else PRODUCT_ROWS)
        x_HTK = F.pad(x_THK.transpose(0, 1), (0, 0, 0, padding)).contiguous()
        if on_cpu or not num_rows:
            return torch.bmm(x_HTK, self._weight_HKN)[:, :num_rows].transpose(0, 1)
        tiles = [torch.bmm(tile, self._weight_HKN) for tile in x_HTK.split(PRODUCT_ROWS, dim=1)]
        return torch.cat(tiles, dim=1)[:, :num_rows].transpose(0, 1)
