"""Dispatch in which every size is agreed beforehand and the host reads nothing.

Shapes: T rows of this rank, D hidden, K experts a row goes to, W = D + K, E members, C capacity,
N = E * C rows that arrived, X own experts, M outputs that a row may be owed by one member.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from interlace.comm.collectives import Exchange, Gather, perform

from .dispatch import Returned
from .dispatch_labels import check_capacity, labels_of, lead_blocks, with_labels
from .placement import Placement
from .to_device import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Rows that arrived, every one of which every own expert computes."""

    rows_ND: torch.Tensor
    index_NK: torch.Tensor
    """Own expert that each slot asks for; -1: none of this rank's."""
    place_TK: torch.Tensor
    """Where among the outputs that come back each slot of this rank's rows is."""


class PaddedDispatcher:
    """As `fixed` or as `gather`, but outputs come back in blocks for the worst case too.

    Which row goes to which expert stays on the device: no forward pass waits for it, and one
    captured graph serves all routings. The price is arithmetic: every own expert computes all N
    rows, and what nobody asked for is dropped. Decode hardly pays it, since a product of few rows
    costs an accelerator what a full tile does; a long prefill does. Issues the same collectives.
    `capacity` is agreed: no rank brings more rows, and all name the same number.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        ep_rank: int,
        capacity: int,
        gathers: bool,
        device: torch.device,
    ) -> None:
        """`gathers`: every row goes to every member, else only to those that need it."""
        self._ep_size, self._capacity, self._gathers = placement.ep_size, capacity, gathers
        own = placement.experts_of(ep_rank)
        index = np.full(placement.num_experts + 1, -1, dtype=np.int64)
        index[np.array(own, dtype=np.int64) + 1] = np.arange(len(own))
        self._num_own = len(own)
        self._experts_of = [len(placement.experts_of(member)) for member in range(self._ep_size)]
        self._num_experts_E = to_device(np.array(self._experts_of, dtype=np.int64), device)
        self._own_index = to_device(index, device)
        self._owner = to_device(np.array(placement.owners, dtype=np.int64), device)

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Padded:
        check_capacity(len(x_TD), self._capacity)
        owner_TK = self._owner[topk_TK]
        rows_TW = with_labels(x_TD, topk_TK)
        if self._gathers:
            payload = F.pad(rows_TW, (0, 0, 0, self._capacity - len(rows_TW)))
            parts = await perform(Gather(role="ep", stage=f"{stage}.dispatch", payload=payload))
            arrived_NW = torch.cat(parts)
            row_T = torch.arange(len(x_TD), device=x_TD.device)
            row_TE = row_T[:, None].expand(-1, self._ep_size)
        else:
            payload, row_TE = lead_blocks(rows_TW, owner_TK, self._ep_size, self._capacity)
            equal = (self._capacity,) * self._ep_size
            arrived_NW = await perform(
                Exchange(
                    role="ep", stage=f"{stage}.dispatch", payload=payload, send=equal, recv=equal
                )
            )
        top_k = topk_TK.shape[1]
        return Padded(
            rows_ND=arrived_NW[:, :-top_k],
            index_NK=self._own_index[labels_of(arrived_NW, top_k).long()],
            place_TK=self._places(owner_TK, row_TE),
        )

    async def combine(self, stage: str, y_XND: torch.Tensor, dispatched: Padded) -> Returned:
        index_NK = dispatched.index_NK
        num_rows, top_k = index_NK.shape
        most = min(top_k, self._num_own)
        # own slots first, in their order; behind them slots of others, whose outputs nobody reads
        slot_NM = torch.argsort(index_NK < 0, dim=1, stable=True)[:, :most]
        index_NM = index_NK.gather(1, slot_NM).clamp(min=0)
        row_N1 = torch.arange(num_rows, device=index_NK.device)[:, None]
        chosen = (index_NM * num_rows + row_N1).flatten()
        outputs_ND = await perform(
            Exchange(
                role="ep",
                stage=f"{stage}.combine",
                payload=y_XND.flatten(0, 1).index_select(0, chosen),
                send=(self._capacity * most,) * self._ep_size,
                recv=tuple(self._capacity * min(top_k, num) for num in self._experts_of),
            )
        )
        return Returned(outputs_ND=outputs_ND, place_TK=dispatched.place_TK)

    def _places(self, owner_TK: torch.Tensor, row_TE: torch.Tensor) -> torch.Tensor:
        """[T, K] a member's outputs lie by row, in the order in which it got them, then by slot."""
        most_E = self._num_experts_E.clamp(max=owner_TK.shape[1])
        first_E = (most_E.cumsum(0) - most_E) * self._capacity
        same_TKK = owner_TK[:, :, None] == owner_TK[:, None, :]
        rank_TK = same_TKK.tril(-1).sum(2)
        return first_E[owner_TK] + row_TE.gather(1, owner_TK) * most_E[owner_TK] + rank_TK
