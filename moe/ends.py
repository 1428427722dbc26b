"""Both ends of a forward pass: rows of tables by their numbers, logits from the last residual.

In one call each where our kernels read the rows, to the bits of the operations of torch.

Shapes: T rows, N rows of a table, D hidden, S sampled rows, V vocabulary, L layers, K experts a row
goes to.
"""

from __future__ import annotations

from typing import Any

import torch

from . import kernels
from .linear import Linear
from .norm import rms_norm


def rows_of(table_ND: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """[T, D] the table's rows of these numbers. IndexError where there is none."""
    if _lies_here(table_ND, ids_T):
        rows_TD = table_ND.new_empty((ids_T.shape[0], table_ND.shape[1]))
        if _take(rows_TD.data_ptr(), table_ND, ids_T):
            return rows_TD
    return table_ND.index_select(0, ids_T)


def rotation_of(
    cos_PE: torch.Tensor, sin_PE: torch.Tensor, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 1, E] each: rows of two tables of one shape and type."""
    if _lies_here(cos_PE, positions_T) and sin_PE.is_contiguous():
        num_rows, width = positions_T.shape[0], cos_PE.shape[1]
        both_2T1E = cos_PE.new_empty((2, num_rows, 1, width))
        first = both_2T1E.data_ptr()
        second = first + num_rows * width * cos_PE.element_size()
        if _take(first, cos_PE, positions_T) and _take(second, sin_PE, positions_T):
            cos_T1E, sin_T1E = both_2T1E.unbind()
            return cos_T1E, sin_T1E
    cos_TE, sin_TE = cos_PE.index_select(0, positions_T), sin_PE.index_select(0, positions_T)
    return cos_TE[:, None], sin_TE[:, None]


def _lies_here(table_ND: torch.Tensor, ids_T: torch.Tensor) -> bool:
    """Whether rows can be copied from where they lie."""
    on_cpu = kernels.native is not None and table_ND.is_cpu
    return on_cpu and table_ND.is_contiguous() and ids_T.is_contiguous()


def _take(to: int, table_ND: torch.Tensor, ids_T: torch.Tensor) -> bool:
    num_rows, width = table_ND.shape
    return kernels.native.take_rows(
        to,
        table_ND.data_ptr(),
        num_rows,
        width * table_ND.element_size(),
        ids_T.data_ptr(),
        ids_T.shape[0],
    )


class End:
    """What comes behind the last layer, made ready before it: only a call is left then.

    Shapes: S rows that are asked for, T rows that were routed.
    """

    def __init__(
        self,
        x_SD: torch.Tensor,
        norm_D: torch.Tensor,
        head: Linear,
        topk_LTK: torch.Tensor | None = None,
        *,
        eps: float,
        multiplier: float = 1,
        id_dtype: torch.dtype = torch.uint8,
    ) -> None:
        """`x_SD` and `topk_LTK` (contiguous int64) are read when it is called."""
        self._x_SD, self._norm_D, self._head = x_SD, norm_D, head
        self._topk_LTK, self._id_dtype = topk_LTK, id_dtype
        self._eps, self._multiplier = eps, multiplier
        self._ready: tuple[Any, ...] = ()
        own = head.own
        if own is None or multiplier != 1 or not x_SD.is_contiguous():
            return
        if not kernels.can_read(x_SD, norm_D) or own.dtype != x_SD.dtype:
            return
        num_rows, width = x_SD.shape
        if own.num_inputs != width:
            raise ValueError(f"rows of {width}, but the head has {own.num_inputs} inputs")
        self._logits_SV = torch.empty((num_rows, own.num_outputs))
        layers, num_routed, top_k = (0, 0, 0) if topk_LTK is None else topk_LTK.shape
        self._ids_TLK = torch.empty((num_routed, layers, top_k), dtype=id_dtype)
        self._ready = (
            x_SD.element_size(),
            self._logits_SV.data_ptr(),
            x_SD.data_ptr(),
            norm_D.data_ptr(),
            num_rows,
            width,
            eps,
            own.address,
            own.num_outputs,
            self._ids_TLK.data_ptr(),
            id_dtype.itemsize,
            0 if topk_LTK is None else topk_LTK.data_ptr(),
            layers,
            num_routed,
            top_k,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """S, D"""
        num_rows, width = self._x_SD.shape
        return num_rows, width

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, V] logits in float32: the rows' norm times the head, rounded to the weights' type
        before; and [T, L, K] the experts, in `id_dtype`."""
        if self._ready:
            kernels.native.finish(*self._ready)
            return self._logits_SV, self._ids_TLK
        logits_SV = self._head(rms_norm(self._x_SD, self._norm_D, self._eps))
        if self._multiplier != 1:
            logits_SV = logits_SV * self._multiplier
        topk_LTK = self._topk_LTK
        if topk_LTK is None:
            topk_LTK = torch.empty((0, 0, 0), dtype=self._id_dtype)
        return logits_SV.float(), topk_LTK.to(self._id_dtype).transpose(0, 1).contiguous()
