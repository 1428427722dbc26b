"""Matrix products whose row bits do not depend on how many rows there are.

Shapes: T rows, K inputs, N outputs, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 16
"""Rows are rounded up to this where the kernel depends on their number."""


class Linear:
    """``x_TK @ weight_NK.T``: equal rows in give bit-equal rows out, whatever else is in the batch.

    On a CPU with bfloat16 arithmetic the weight is packed once into oneDNN's blocked layout, whose
    kernels treat every row alike and are fastest for few rows. Elsewhere the rows are rounded up
    to a multiple of 16 in one product: kernels for one to seven rows sum in another order.
    One thread is assumed; with more, a product may be cut along its rows.
    """

    __slots__ = ("_packed", "_weight", "num_outputs")

    def __init__(self, weight_NK: torch.Tensor) -> None:
        """Takes the weight over; when it is packed, the original is not kept."""
        self.num_outputs: int = weight_NK.shape[0]
        self._packed = can_pack(weight_NK)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous())
            if self._packed
            else weight_NK.contiguous()
        )

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        num_rows = x_TK.shape[0]
        if num_rows == 0:
            return x_TK.new_empty((0, self.num_outputs))
        if self._packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x_TK, self._weight, None, "none", [], ""
            )
            return packed
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


class HeadwiseLinear:
    """``x_THK -> y_THN``, every head with a weight of its own; the same promise as `Linear`."""

    __slots__ = ("_weight_HKN",)

    def __init__(self, weight_HNK: torch.Tensor) -> None:
        self._weight_HKN = weight_HNK.transpose(1, 2).contiguous()

    def __call__(self, x_THK: torch.Tensor) -> torch.Tensor:
        num_rows = x_THK.shape[0]
        x_HTK = F.pad(x_THK.transpose(0, 1), (0, 0, 0, -num_rows % ROW_MULTIPLE))
        return torch.bmm(x_HTK.contiguous(), self._weight_HKN)[:, :num_rows].transpose(0, 1)
