"""Our own kernels for CPUs, in bfloat16 and float32: where they can be used, and weights in their
order.

They are C++ (`native/`), built where there is a compiler and used where the processor has AVX2,
AVX-512 with bfloat16, or matrix tiles (AMX) too. What they do, torch does elsewhere: each caller
has both, side by side. The sums of a row have a fixed order, so equal rows give equal bits whatever
else is in the batch.

Shapes: T rows, K inputs, N outputs or rows in any order, R rows sorted by expert, D hidden, I width
of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arena import Arena

try:
    from . import _kernels
except ImportError:  # there was no compiler
    _kernels = None  # type: ignore[assignment]

native = _kernels
"""The extension; None where it was not built."""

DTYPES = (torch.bfloat16, torch.float32)
"""Types of tensors that the kernels read."""
UNIT = 16
"""Widths of what kernels read and write row by row are multiples of this."""


def instructions() -> str:
    """The instructions our kernels use here; empty where torch does their work."""
    return "" if native is None else native.instructions()


NAMES = {
    "amx": "AMX BF16",
    "avx512": "AVX-512",
    "avx512-bf16": "AVX-512 BF16",
    "avx2": "AVX2",
}
"""What a job calls the instructions there may be kernels for."""


def choose(name: str) -> None:
    """Use these instructions, or the best if it is ``auto``, for weights loaded from now on.

    For the whole process. Raises ValueError if the processor does not run them.
    """
    choices = () if native is None else native.choices()
    if name != "auto" and NAMES[name] not in choices:
        names = [own for own, other in NAMES.items() if other in choices]
        raise ValueError(
            f"model.kernels is {name}, but this machine has "
            f"{' and '.join(names) or 'no kernels of ours'}: take auto, or one that all ranks have"
        )
    if choices:
        native.use(choices[0] if name == "auto" else NAMES[name])


def has_tiles() -> bool:
    """Whether bfloat16 is multiplied on matrix tiles."""
    return instructions() == NAMES["amx"]


def usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for such tensors."""
    return native is not None and dtype in DTYPES and device.type == "cpu" and instructions() != ""


def can_read(*rows: torch.Tensor) -> bool:
    """Whether the kernels for single rows can read these together, once they are contiguous.

    It is a matter of type and width alone: how rows happen to lie must not change their bits.
    """
    dtype, device = rows[0].dtype, rows[0].device
    if not usable(dtype, device):
        return False
    for x in rows:  # noqa: SIM110 - a generator takes longer, and this is asked often
        if x.dtype != dtype or x.device != device or x.shape[-1] % UNIT:
            return False
    return True


class PackedWeight:
    """A weight in the order in which products read it; the original is not kept."""

    __slots__ = ("_memory", "address", "dtype", "num_inputs", "num_outputs")

    def __init__(self, weight_NK: torch.Tensor, arena: Arena | None = None) -> None:
        """Copies the weight. `can_pack` says of which weights there is such a copy."""
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.dtype = weight_NK.dtype
        padded = -(-self.num_outputs // UNIT) * UNIT
        self._memory = (arena or Arena()).take(self.dtype.itemsize * padded * self.num_inputs)
        self.address = self._memory.data_ptr()
        native.pack(
            self.dtype.itemsize,
            self.address,
            weight_NK.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            weight_NK.stride(0),
            weight_NK.stride(1),
        )

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] products, summed in float32 and rounded once."""
        if x_TK.dtype != self.dtype or x_TK.shape[1] != self.num_inputs:
            raise ValueError(
                f"rows of {x_TK.shape[1]} {x_TK.dtype}, but the weight has {self.num_inputs} "
                f"inputs in {self.dtype}"
            )
        x_TK = _dense(x_TK)
        out_TN = x_TK.new_empty((x_TK.shape[0], self.num_outputs))
        self.multiply(x_TK, out_TN)
        return out_TN

    def multiply(self, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        """The same into rows that are there; in both, a row's elements lie side by side."""
        native.multiply(
            self.dtype.itemsize,
            out_TN.data_ptr(),
            out_TN.stride(0),
            x_TK.data_ptr(),
            x_TK.stride(0),
            x_TK.shape[0],
            self.address,
            self.num_outputs,
            self.num_inputs,
        )


def can_pack(weight_NK: torch.Tensor) -> bool:
    """Whether the kernels multiply with this weight: inputs are read 32 bits at a time."""
    together = 4 // weight_NK.dtype.itemsize
    return usable(weight_NK.dtype, weight_NK.device) and weight_NK.shape[1] % together == 0


class PackedExpert:
    """A gated MLP's three matrices, the first two interleaved so that a tile has both."""

    __slots__ = ("_down", "_gate_up", "addresses", "dtype", "hidden", "width")

    def __init__(
        self,
        *,
        gate_ID: torch.Tensor,
        up_ID: torch.Tensor,
        down_DI: torch.Tensor,
        arena: Arena | None = None,
    ) -> None:
        """The width must be a multiple of 32."""
        self.width, self.hidden = gate_ID.shape
        self.dtype = gate_ID.dtype
        half = native.panel() // 2
        both = [weight.unflatten(0, (-1, half)) for weight in (gate_ID, up_ID)]
        self._gate_up = PackedWeight(torch.cat(both, dim=1).flatten(0, 1), arena)
        self._down = PackedWeight(down_DI, arena)
        self.addresses = (self._gate_up.address, self._down.address)


class PackedHeads:
    """A weight for each head."""

    __slots__ = ("_heads",)

    def __init__(self, weight_HNK: torch.Tensor) -> None:
        self._heads = [PackedWeight(weight_NK) for weight_NK in weight_HNK]

    def __call__(self, x_THK: torch.Tensor) -> torch.Tensor:
        """[T, H, N]"""
        x_THK = _dense(x_THK)
        num_outputs = self._heads[0].num_outputs
        out_THN = x_THK.new_empty((*x_THK.shape[:2], num_outputs))
        for head, weight in enumerate(self._heads):
            weight.multiply(x_THK[:, head], out_THN[:, head])
        return out_THN


def apply_packed_experts(
    experts: Sequence[PackedExpert],
    x_ND: torch.Tensor,
    counts_X: Sequence[int],
    out_ND: torch.Tensor,
    *,
    reads_R: torch.Tensor | None = None,
    writes_R: torch.Tensor | None = None,
) -> None:
    """Each row's expert applied to it, into `out_ND`. All in one call.

    Rows are sorted by expert. With `reads_R`, row i of them is row ``reads_R[i]`` of x; with
    `writes_R` its output becomes row ``writes_R[i]`` of `out_ND`.
    """
    x_ND = _dense(x_ND)
    native.experts(*_pass_of(experts, x_ND, counts_X, out_ND, reads_R, writes_R))


def packed_experts_apart(
    experts: Sequence[PackedExpert],
    x_ND: torch.Tensor,
    counts_X: Sequence[int],
    out_ND: torch.Tensor,
    *,
    reads_R: torch.Tensor | None = None,
    writes_R: torch.Tensor | None = None,
) -> object:
    """The same, to be computed by `native.compute_on` by and by. Keeps all that is given alive."""
    x_ND = _dense(x_ND)
    owners = experts, x_ND, out_ND, reads_R, writes_R
    given = _pass_of(experts, x_ND, counts_X, out_ND, reads_R, writes_R)
    return native.experts_apart(*(*given, owners))


def _pass_of(
    experts: Sequence[PackedExpert],
    x_ND: torch.Tensor,
    counts_X: Sequence[int],
    out_ND: torch.Tensor,
    reads_R: torch.Tensor | None,
    writes_R: torch.Tensor | None,
) -> tuple[Any, ...]:
    """What a call is given."""
    num_rows, width = x_ND.shape
    hidden, dtype = experts[0].hidden, experts[0].dtype
    num_read = num_rows if reads_R is None else reads_R.shape[0]
    num_written = out_ND.shape[0] if writes_R is None else writes_R.shape[0]
    if sum(counts_X) != num_read or x_ND.dtype != dtype or width != hidden:
        raise ValueError(
            f"{num_read} rows of {width} {x_ND.dtype}, but the experts get {sum(counts_X)} rows of "
            f"{hidden} in {dtype}"
        )
    if num_written != num_read or out_ND.shape[1] != hidden or not out_ND.is_contiguous():
        raise ValueError(
            f"{num_read} outputs of {hidden}, but there is room for {num_written} of "
            f"{out_ND.shape[1]}, {out_ND.stride(0)} apart"
        )
    return (
        dtype.itemsize,
        out_ND.data_ptr(),
        x_ND.data_ptr(),
        x_ND.stride(0),
        0 if reads_R is None else reads_R.data_ptr(),
        0 if writes_R is None else writes_R.data_ptr(),
        hidden,
        experts[0].width,
        counts_X,
        [address for expert in experts for address in expert.addresses],
    )


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose elements lie side by side; the rows themselves may lie anywhere."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
