"""How rows reach their experts and come back.

Shapes: T rows of this rank, D hidden, K experts a row goes to, R rows received, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch

from interlace.comm.collectives import Exchange, perform

from . import kernels
from .placement import Placement
from .to_device import to_device

D = TypeVar("D")
"""What a strategy remembers between the way to the experts and the way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows that arrived for this rank's experts, and what is needed to send them back."""

    rows_RD: torch.Tensor
    """Sorted by expert, in the order of `Placement.experts_of`."""
    expert_counts: tuple[int, ...]
    """Rows of each own expert."""
    arrival_R: torch.Tensor | None
    """Place in order of arrival of each sorted row; None: they arrived sorted."""
    sent_order: torch.Tensor
    """[T * K] top-k slot of each output that comes back."""
    top_k: int
    sent: tuple[int, ...]
    """Outputs each member owes this rank."""
    received: tuple[int, ...]
    """Outputs this rank owes each member."""

    def in_order_of_arrival(self, y_RD: torch.Tensor) -> torch.Tensor:
        """[R, D] the experts' outputs, member 0's rows first."""
        if self.arrival_R is None:
            return y_RD
        return placed(y_RD, self.arrival_R)

    def into_slots(self, returned: torch.Tensor) -> torch.Tensor:
        """[T, K, D] from what came back for this rank's rows, member 0's outputs first."""
        slots = placed(returned, self.sent_order)
        return slots.view(len(slots) // self.top_k, self.top_k, slots.shape[1])


def placed(rows_RD: torch.Tensor, place_R: torch.Tensor) -> torch.Tensor:
    """[R, D] row i at ``place_R[i]``; the places are all there are, each once."""
    if kernels.native is None or rows_RD.device.type != "cpu":
        return torch.empty_like(rows_RD).index_copy_(0, place_R, rows_RD)
    if len(place_R) != len(rows_RD):
        raise ValueError(f"{len(rows_RD)} rows for {len(place_R)} places")
    rows_RD = rows_RD.contiguous()
    out_RD = torch.empty_like(rows_RD)
    kernels.native.put_rows(
        out_RD.data_ptr(),
        rows_RD.data_ptr(),
        rows_RD.shape[1] * rows_RD.element_size(),
        place_R.data_ptr(),
        rows_RD.shape[0],
    )
    return out_RD


def deal(
    x_TD: torch.Tensor, topk_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T * K] slots by expert, then by row; [X] how many each expert has; [T * K, D] their rows."""
    x_TD, topk_TK = x_TD.contiguous(), topk_TK.contiguous()
    num_slots, top_k = topk_TK.numel(), topk_TK.shape[1]
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    order = torch.empty(num_slots, dtype=torch.int64)
    counts_X = torch.empty(num_experts, dtype=torch.int64)
    rows = x_TD.new_empty((num_slots, x_TD.shape[1]))
    kernels.native.deal(
        rows.data_ptr(),
        order.data_ptr(),
        counts_X.data_ptr(),
        x_TD.data_ptr(),
        row_bytes,
        row_bytes,
        topk_TK.data_ptr(),
        num_slots,
        top_k,
        num_experts,
    )
    return order, counts_X, rows


class Dispatcher(Protocol[D]):
    """A strategy of moving rows. Both calls suspend, the same number of times whatever the rows."""

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> D: ...

    async def combine(self, stage: str, y: torch.Tensor, dispatched: D, /) -> torch.Tensor:
        """[T, K, D] the experts' outputs `y` for this rank's rows, in their top-k slots."""
        ...


async def send_back(stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
    """[T, K, D] in the owners' slots: ``{stage}.combine`` moves exactly the outputs there are."""
    returned = await perform(
        Exchange(
            role="ep",
            stage=f"{stage}.combine",
            payload=dispatched.in_order_of_arrival(y_RD),
            send=dispatched.received,
            recv=dispatched.sent,
        )
    )
    return dispatched.into_slots(returned)


class AllToAllDispatcher:
    """Counts first, then exactly the rows that are needed, over role "ep".

    Issues ``{stage}.counts``, ``{stage}.dispatch`` and ``{stage}.combine``, in groups of one and
    for no rows too. Outputs come back to the slot they left from, so the sum over experts is the
    owner's and its order is fixed.
    """

    def __init__(self, *, placement: Placement, ep_rank: int) -> None:
        self._placement = placement
        self._ep_rank = ep_rank
        self._experts_per_rank = tuple(
            len(placement.experts_of(rank)) for rank in range(placement.ep_size)
        )
        ends = tuple(accumulate(self._experts_per_rank, initial=0))
        self._experts_of_rank = tuple(pairwise(ends))
        order = placement.order
        contiguous = order == tuple(range(placement.num_experts))
        self._rank_in_order_X = None if contiguous else np.argsort(np.array(order))

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        sent_order, counts_X, rows = self._pack(x_TD, topk_TK)
        own = (self._experts_per_rank[self._ep_rank],) * self._placement.ep_size
        arrived_counts = await perform(
            Exchange(
                role="ep",
                stage=f"{stage}.counts",
                payload=counts_X,
                send=self._experts_per_rank,
                recv=own,
            )
        )
        sent = self._rows_per_rank(counts_X)
        counts_by_source = arrived_counts.cpu().numpy().reshape(self._placement.ep_size, own[0])
        received = tuple(counts_by_source.sum(1).tolist())
        arrived = await perform(
            Exchange(role="ep", stage=f"{stage}.dispatch", payload=rows, send=sent, recv=received)
        )
        arrival_R = self._sort_by_expert(counts_by_source, arrived)
        return Dispatched(
            rows_RD=arrived if arrival_R is None else arrived.index_select(0, arrival_R),
            expert_counts=tuple(counts_by_source.sum(0).tolist()),
            arrival_R=arrival_R,
            sent_order=sent_order,
            top_k=topk_TK.shape[1],
            sent=sent,
            received=received,
        )

    async def combine(self, stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return await send_back(stage, y_RD, dispatched)

    def _pack(
        self, x_TD: torch.Tensor, topk_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots sorted by expert in sending order, rows per expert, and the rows themselves: in one
        call where there is an extension and experts are sent in their own order."""
        on_cpu = x_TD.device.type == "cpu"
        if kernels.native is not None and on_cpu and self._rank_in_order_X is None:
            return deal(x_TD, topk_TK, self._placement.num_experts)
        return self._pack_in_torch(x_TD, topk_TK)

    def _pack_in_torch(
        self, x_TD: torch.Tensor, topk_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, operation by operation."""
        key = topk_TK.flatten()
        if self._rank_in_order_X is not None:
            key = to_device(self._rank_in_order_X, key.device)[key]
        sent_order = torch.argsort(key, stable=True)
        # not bincount: on an accelerator the host would wait for it, before the counts travel
        counts_X = key.new_zeros(self._placement.num_experts)
        counts_X.scatter_add_(0, key, torch.ones_like(key))
        rows = x_TD.index_select(0, sent_order // topk_TK.shape[1])
        return sent_order, counts_X, rows

    def _rows_per_rank(self, counts_X: torch.Tensor) -> tuple[int, ...]:
        counts = counts_X.tolist()
        return tuple(sum(counts[first:end]) for first, end in self._experts_of_rank)

    def _sort_by_expert(
        self, counts_by_source: np.ndarray[tuple[int, int], np.dtype[np.int64]], rows: torch.Tensor
    ) -> torch.Tensor | None:
        if self._placement.ep_size == 1:
            return None
        num_own = counts_by_source.shape[1]
        expert_R = np.repeat(
            np.tile(np.arange(num_own), self._placement.ep_size), counts_by_source.ravel()
        )
        return to_device(np.argsort(expert_R, kind="stable"), rows.device)
