"""Every rank of one tensor-parallel group has every row already, so nothing is dispatched.

Shapes: T rows, D hidden, K experts a row goes to, R rows of own experts, N outputs of all members,
each one's padded to the most that one has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlace.comm.collectives import Gather, perform

from .dispatch import Dispatched, Returned
from .placement import Placement
from .to_device import to_device


class ReplicatedDispatcher:
    """Members hold the same rows; each computes those of its own experts, and all sum the same.

    Issues ``{stage}.combine`` alone, a Gather of all outputs: who has all rows knows how many each
    member has. Outputs travel to every member and are summed by each in slot order, so nothing has
    to be sent afterwards, and no sum crosses ranks.
    """

    def __init__(self, *, placement: Placement, ep_rank: int) -> None:
        self._placement, self._ep_rank = placement, ep_rank
        order = torch.tensor(placement.order, dtype=torch.int64)
        self._rank_in_order_X = torch.empty_like(order)
        self._rank_in_order_X[order] = torch.arange(len(order))

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        placement, top_k = self._placement, topk_TK.shape[1]
        key = self._rank_in_order_X[topk_TK.flatten().cpu()]
        order = torch.argsort(key, stable=True)
        counts = torch.bincount(key, minlength=placement.num_experts)
        each = [len(placement.experts_of(rank)) for rank in range(placement.ep_size)]
        by_rank = [tuple(part.tolist()) for part in counts.split(each)]
        totals = torch.tensor([sum(part) for part in by_rank])
        ends = totals.cumsum(0)
        own = order[int(ends[self._ep_rank] - totals[self._ep_rank]) : int(ends[self._ep_rank])]
        # an output's place: its member's part, and behind whom it is in there
        most, nth = int(totals.max()), torch.arange(len(order))
        member = torch.searchsorted(ends, nth, right=True)
        place = torch.empty_like(order)
        place[order] = member * most + nth - (ends - totals)[member]
        return Dispatched(
            rows_ND=x_TD,
            expert_counts=by_rank[self._ep_rank],
            reads_R=to_device((own // top_k).numpy(), x_TD.device),
            writes_R=None,
            place_TK=to_device(place.view_as(topk_TK).numpy(), x_TD.device),
            sent=tuple(totals.tolist()),
            received=(len(own),) * placement.ep_size,
        )

    async def combine(self, stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> Returned:
        missing = max(dispatched.sent) - len(y_RD)
        padded = F.pad(y_RD, (0, 0, 0, missing)) if missing else y_RD
        parts = await perform(Gather(role="ep", stage=f"{stage}.combine", payload=padded))
        return Returned(outputs_ND=torch.cat(parts), place_TK=dispatched.place_TK)
