"""Root-mean-square norms of rows.

Shapes: T rows, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import kernels


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, D] each row divided by its root mean square, times the weight; rounded at the end."""
    if not kernels.can_read(x_TD, weight_D):
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    num_rows, width = x_TD.shape
    kernels.native.norm(
        x_TD.element_size(),
        out_TD.data_ptr(),
        0,
        x_TD.data_ptr(),
        width,
        0,
        weight_D.data_ptr(),
        num_rows,
        width,
        eps,
        0.0,
    )
    return out_TD


def add_and_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor, weight_D: torch.Tensor, *, factor: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + factor * y``, and its `rms_norm`."""
    if not kernels.can_read(x_TD, y_TD, weight_D):
        sum_TD = add(x_TD, y_TD, factor)
        return sum_TD, rms_norm(sum_TD, weight_D, eps)
    x_TD, y_TD = x_TD.contiguous(), y_TD.contiguous()
    sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    num_rows, width = x_TD.shape
    kernels.native.norm(
        x_TD.element_size(),
        out_TD.data_ptr(),
        sum_TD.data_ptr(),
        x_TD.data_ptr(),
        width,
        y_TD.data_ptr(),
        weight_D.data_ptr(),
        num_rows,
        width,
        eps,
        factor,
    )
    return sum_TD, out_TD


def add(x_TD: torch.Tensor, y_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """``x + factor * y``"""
    return x_TD + (y_TD if factor == 1 else y_TD * factor)
