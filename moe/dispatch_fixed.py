"""Blocks of a size agreed beforehand, large enough for the worst case."""

from __future__ import annotations

import numpy as np
import torch

from interlace.comm.collectives import Exchange, perform

from .dispatch import Dispatched, Returned
from .dispatch_labels import Labels, check_capacity, lead_blocks, places, with_labels
from .placement import Placement
from .to_device import to_device


class FixedDispatcher:
    """Equal blocks between all ranks, so that every size is known before a row is routed.

    Issues ``{stage}.dispatch`` and ``{stage}.combine``, both Exchanges whose sizes depend on
    `capacity` alone. A row goes once to each rank that owns one of its experts: a block holds
    `capacity` rows, and as many outputs come back for each as one rank could owe, so no token is
    ever dropped. `capacity` is agreed: no rank brings more rows, and all name the same number.
    """

    def __init__(self, *, placement: Placement, ep_rank: int, capacity: int) -> None:
        self._labels = Labels(placement=placement, ep_rank=ep_rank)
        self._placement, self._ep_rank, self._capacity = placement, ep_rank, capacity
        self._owner_X = np.array(placement.owners, dtype=np.int64)

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        check_capacity(len(x_TD), self._capacity)
        equal = (self._capacity,) * self._placement.ep_size
        owner_TK = to_device(self._owner_X, topk_TK.device)[topk_TK]
        payload, _ = lead_blocks(
            with_labels(x_TD, topk_TK), owner_TK, self._placement.ep_size, self._capacity
        )
        arrived = await perform(
            Exchange(
                role="ep",
                stage=f"{stage}.dispatch",
                payload=payload,
                send=equal,
                recv=equal,
            )
        )
        return self._labels.select(arrived, topk_TK)

    async def combine(self, stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> Returned:
        owed = tuple(
            self._capacity
            * min(dispatched.place_TK.shape[1], len(self._placement.experts_of(member)))
            for member in range(self._placement.ep_size)
        )
        mine = (owed[self._ep_rank],) * len(owed)
        payload = y_RD.new_zeros((sum(mine), y_RD.shape[1]))
        payload.index_copy_(0, places(dispatched.received, mine, y_RD), y_RD)
        outputs_ND = await perform(
            Exchange(role="ep", stage=f"{stage}.combine", payload=payload, send=mine, recv=owed)
        )
        place_TK = dispatched.place_TK
        real = places(dispatched.sent, owed, outputs_ND)
        return Returned(outputs_ND=outputs_ND, place_TK=real[place_TK])
