"""A pass through all layers in one call of our kernels, where no other path goes in between.

The same blocks, experts and sums as in `Model.compute`, in the same order and to the same bits, and
the same messages between ranks: only the way back to Python between them is left out
(`native/straight.h`). For layers of experts on a CPU whose heads are not split.

Shapes: T rows, D hidden, L layers, K experts a row goes to.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.comm.collectives import Arrival, Stretch, perform
from interlace.comm.crossing import Crossing

from . import kernels
from .attention_block import AttentionBlock
from .batch import Batch
from .context import PathContext
from .experts import Expert
from .mixture import MixtureLayer

_OF_LAYER = "<qqqqqqqdqqqqqqddd"
"""Types of `AttentionBlock.of_layer`."""
_WAITS, _FAULT = 1, 2
"""What `go_on` may answer; 0 is through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straight:
    """What the call needs of one version of the weights, found once. Lives beside the weights,
    which own the memory."""

    item_size: int
    top_k: int
    width: int
    """Of an expert."""
    num_layers: int
    layers: bytes
    """Of each: `AttentionBlock.of_layer`, then the addresses of the experts' matrices."""
    stretch: Stretch

    @classmethod
    def of(
        cls, blocks: Sequence[tuple[AttentionBlock | None, MixtureLayer | Expert]]
    ) -> Straight | None:
        """Of these layers; None where one is not our kernels' or more than they do."""
        layers: list[bytes] = []
        widths: set[int] = set()
        for block, mixture in blocks:
            if block is None or not isinstance(mixture, MixtureLayer) or mixture.shared is not None:
                return None
            packed = [expert.packed for expert in mixture.experts if expert.packed is not None]
            if len(packed) < max(1, len(mixture.experts)):
                return None
            widths.update(expert.width for expert in packed)
            matrices = [address for expert in packed for address in expert.addresses]
            numbers = struct.pack(_OF_LAYER + len(matrices) * "q", *block.of_layer, *matrices)
            layers.append(numbers)
        first = blocks[0][0] if blocks else None
        if first is None or len(widths) > 1 or len({len(numbers) for numbers in layers}) > 1:
            return None
        parts = ("counts", "dispatch", "combine")
        stages = tuple(f"{index}.{part}" for index in range(len(layers)) for part in parts)
        return cls(
            item_size=first.item_size,
            top_k=first.top_k,
            width=widths.pop(),
            num_layers=len(layers),
            layers=b"".join(layers),
            stretch=Stretch(stages=stages, role="ep"),
        )

    def fits(self, context: PathContext) -> bool:
        """Whether a path's passes are to go straight, and can: all heads are this rank's, and rows
        are dispatched by counts, to experts in their own order."""
        return (
            context.straight
            and context.kv.pages is not None
            and context.tp_size == 1
            and context.dispatch == "all_to_all"
            and context.expert_placement.in_order
        )

    def begin(
        self,
        crossing: Crossing,
        context: PathContext,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Make a pass ready to go `through`. In the end there are, in the first of `x_TD`, the last
        layer's residual of rows that are asked for, [S, D]: those returned first, or all that there
        are; and [L, T, K] the experts that all rows went to."""
        pages, placement = context.kv.pages, context.expert_placement
        assert pages is not None
        assert x_TD.is_contiguous()
        num_rows = batch.num_rows
        asked_S = None if batch.samples_all else _only(batch.sample_rows, num_rows)
        topk_LTK = torch.empty((self.num_layers, num_rows, self.top_k), dtype=torch.int64)
        cos_T1E, sin_T1E = rotation
        crossing.run = kernels.native.straight(
            self.item_size,
            x_TD.data_ptr(),
            topk_LTK.data_ptr(),
            num_rows,
            cos_T1E.data_ptr(),
            sin_T1E.data_ptr(),
            batch.slot_mapping.data_ptr(),
            pages.address(0),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.cu_seqlens_q.data_ptr(),
            batch.positions.data_ptr(),
            len(batch.context_lens),
            pages.pool.stride(0),
            self.width,
            0 if asked_S is None else asked_S.data_ptr(),
            -1 if asked_S is None else len(asked_S),
            placement.num_owned,
            self.layers,
            self.num_layers,
        )
        return asked_S, topk_LTK

    async def through(self, crossing: Crossing) -> None:
        """All layers of a pass that is ready."""
        while outcome := go_on(crossing):
            if outcome == _FAULT:
                raise next(e for one in _together(crossing) if (e := one.error()) is not None)
            await perform(Arrival())


def _only(rows_S: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """Rows that the last layer's experts are for, where they are fewer than all and ascend."""
    if len(rows_S) >= num_rows or not bool((rows_S.diff() > 0).all()):
        return None
    return rows_S.contiguous()


def _together(crossing: Crossing) -> tuple[Crossing, ...]:
    return crossing.abreast or (crossing,)


def go_on(crossing: Crossing) -> int:
    """Compute as far as messages have come; of passes side by side, once both are ready."""
    first, *others = _together(crossing)
    if first.run is None or any(one.run is None for one in others):
        return _WAITS
    if not others:
        return kernels.native.go_on(first.run, first.address)
    (second,) = others
    return kernels.native.go_on_beside(first.run, first.address, second.run, second.address)
