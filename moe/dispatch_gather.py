"""Every rank sees every row and computes those of its own experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlace.comm.collectives import Gather, perform

from .dispatch import Dispatched, Returned, send_back
from .dispatch_labels import Labels, check_capacity, with_labels
from .placement import Placement


class GatherDispatcher:
    """All rows of all ranks to all ranks, padded to `capacity` rows each; no counts travel.

    Issues ``{stage}.dispatch``, a Gather, and ``{stage}.combine``, an Exchange of exactly the
    outputs there are: having seen all labels both ends know how many. The owner sums. `capacity` is
    agreed: no rank brings more rows, and all name the same number.
    """

    def __init__(self, *, placement: Placement, ep_rank: int, capacity: int) -> None:
        self._labels = Labels(placement=placement, ep_rank=ep_rank)
        self._capacity = capacity

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        check_capacity(len(x_TD), self._capacity)
        rows_TW = with_labels(x_TD, topk_TK)
        padded = F.pad(rows_TW, (0, 0, 0, self._capacity - len(rows_TW)))
        parts = await perform(Gather(role="ep", stage=f"{stage}.dispatch", payload=padded))
        return self._labels.select(torch.cat(parts), topk_TK)

    async def combine(self, stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> Returned:
        return await send_back(stage, y_RD, dispatched)
