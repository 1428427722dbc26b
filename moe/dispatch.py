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

    rows_ND: torch.Tensor
    """As they arrived."""
    expert_counts: tuple[int, ...]
    """Rows of each own expert, in the order of `Placement.experts_of`."""
    reads_R: torch.Tensor | None
    """Where in `rows_ND` each row is, sorted by expert; None: they arrived sorted."""
    writes_R: torch.Tensor | None
    """Which output each row's is, when those owed to member 0 come first; None: they are sorted."""
    place_TK: torch.Tensor
    """Where among the outputs that come back each slot of this rank's rows is."""
    sent: tuple[int, ...]
    """Outputs each member owes this rank."""
    received: tuple[int, ...]
    """Outputs this rank owes each member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """Outputs that came back for this rank's rows."""

    outputs_ND: torch.Tensor
    place_TK: torch.Tensor
    """Which of them each slot's is."""

    def in_slots(self) -> torch.Tensor:
        """[T, K, D]"""
        slots = self.outputs_ND.index_select(0, self.place_TK.flatten())
        return slots.view(*self.place_TK.shape, slots.shape[1])


def deal(
    x_TD: torch.Tensor, topk_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T * K, D] rows by expert, then as they come; [T, K] where each slot's is; [X] how many each
    expert has."""
    x_TD, topk_TK = x_TD.contiguous(), topk_TK.contiguous()
    num_slots, top_k = topk_TK.numel(), topk_TK.shape[1]
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    place_TK = torch.empty_like(topk_TK)
    counts_X = torch.empty(num_experts, dtype=torch.int64)
    rows = x_TD.new_empty((num_slots, x_TD.shape[1]))
    kernels.native.deal(
        rows.data_ptr(),
        place_TK.data_ptr(),
        counts_X.data_ptr(),
        x_TD.data_ptr(),
        row_bytes,
        row_bytes,
        topk_TK.data_ptr(),
        num_slots,
        top_k,
        num_experts,
    )
    return rows, place_TK, counts_X


class Dispatcher(Protocol[D]):
    """A strategy of moving rows. Both calls suspend, the same number of times whatever the rows."""

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> D: ...

    async def combine(self, stage: str, y: torch.Tensor, dispatched: D, /) -> Returned:
        """The experts' outputs for this rank's rows. `y` are those of the rows that arrived, in the
        order of `Dispatched.writes_R`, or of `Padded.rows_ND` for every expert."""
        ...


async def send_back(stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> Returned:
    """``{stage}.combine`` moves exactly the outputs there are."""
    outputs_ND = await perform(
        Exchange(
            role="ep",
            stage=f"{stage}.combine",
            payload=y_RD,
            send=dispatched.received,
            recv=dispatched.sent,
        )
    )
    return Returned(outputs_ND=outputs_ND, place_TK=dispatched.place_TK)


class AllToAllDispatcher:
    """Counts first, then exactly the rows that are needed, over role "ep".

    Issues ``{stage}.counts``, ``{stage}.dispatch`` and ``{stage}.combine``, in groups of one and
    for no rows too. Outputs come back to the slot they left from, so the sum over experts is the
    owner's and its order is fixed.
    """

    def __init__(self, *, placement: Placement, ep_rank: int) -> None:
        self._placement = placement
        self._ep_rank = ep_rank
        self._experts_per_rank = placement.num_owned
        ends = tuple(accumulate(self._experts_per_rank, initial=0))
        self._experts_of_rank = tuple(pairwise(ends))
        self._rank_in_order_X = None if placement.in_order else np.argsort(placement.order)

    async def dispatch(self, stage: str, x_TD: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        rows, place_TK, counts_X = self._pack(x_TD, topk_TK)
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
        arrived_counts = arrived_counts.cpu().contiguous()
        counts_by_source = arrived_counts.numpy().reshape(self._placement.ep_size, own[0])
        received = tuple(counts_by_source.sum(1).tolist())
        arrived = await perform(
            Exchange(role="ep", stage=f"{stage}.dispatch", payload=rows, send=sent, recv=received)
        )
        order_R = None
        if self._placement.ep_size > 1:
            order = order_by_expert(arrived_counts, own[0])
            order_R = to_device(order.numpy(), arrived.device)
        return Dispatched(
            rows_ND=arrived,
            expert_counts=tuple(counts_by_source.sum(0).tolist()),
            reads_R=order_R,
            writes_R=order_R,
            place_TK=place_TK,
            sent=sent,
            received=received,
        )

    async def combine(self, stage: str, y_RD: torch.Tensor, dispatched: Dispatched) -> Returned:
        return await send_back(stage, y_RD, dispatched)

    def _pack(
        self, x_TD: torch.Tensor, topk_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows by expert in sending order, where each slot's is, and how many each expert has: in
        one call where there is an extension and experts are sent in their own order."""
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
        place_TK = torch.empty_like(key).index_copy_(
            0, sent_order, torch.arange(len(key), device=key.device)
        )
        return rows, place_TK.view_as(topk_TK), counts_X

    def _rows_per_rank(self, counts_X: torch.Tensor) -> tuple[int, ...]:
        counts = counts_X.tolist()
        return tuple(sum(counts[first:end]) for first, end in self._experts_of_rank)


def order_by_expert(counts: torch.Tensor, num_own: int) -> torch.Tensor:
    """[R] the rows of the first own expert, in the order in which they arrived, then the next
    one's. Each source's rows came sorted by expert; `counts` are its experts', source by source."""
    if kernels.native is None:
        return order_in_torch(counts, num_own)
    order_R = torch.empty(int(counts.sum()), dtype=torch.int64)
    num_sources = len(counts) // num_own if num_own else 0
    kernels.native.by_expert(order_R.data_ptr(), counts.data_ptr(), num_sources, num_own)
    return order_R


def order_in_torch(counts: torch.Tensor, num_own: int) -> torch.Tensor:
    """The same, operation by operation."""
    expert = torch.arange(len(counts)) % max(num_own, 1)
    return torch.argsort(expert.repeat_interleave(counts), stable=True)
