"""Rows that carry the ids of their experts, so that no counts have to travel before them.

Shapes: T rows of this rank, D hidden, K experts a row goes to, W = D + K, N rows that arrived
(equally many from each member), E members, P (row, slot) pairs for own experts, R = P rows sorted
by expert, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .dispatch import Dispatched
from .placement import Placement
from .to_device import to_device

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type whose bits fit into one element of a row."""


def with_labels(x_TD: torch.Tensor, topk_TK: torch.Tensor) -> torch.Tensor:
    """[T, W] in the rows' own type; the labels' bits are those of an integer of its size.

    A label is the expert's id plus one; zero is nobody, so rows of zeros are padding.
    """
    labels_TK = (topk_TK + 1).to(_INTEGERS[x_TD.element_size()]).view(x_TD.dtype)
    return torch.cat((x_TD, labels_TK), dim=1)


def labels_of(rows_NW: torch.Tensor, top_k: int) -> torch.Tensor:
    """[N, K] what `with_labels` wrote."""
    return rows_NW[:, -top_k:].contiguous().view(_INTEGERS[rows_NW.element_size()])


def lead_blocks(
    rows_TW: torch.Tensor, owner_TK: torch.Tensor, num_members: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[members * capacity, W] blocks, each led by the rows its member needs, in their order; and
    [T, members] each row's place in each block, which counts only where it is needed.

    The host reads nothing: what a member does not need goes to a last row that is cut off.
    """
    device = rows_TW.device
    needed_TE = torch.zeros((len(rows_TW), num_members), dtype=torch.bool, device=device)
    needed_TE.scatter_(1, owner_TK, True)
    row_TE = needed_TE.cumsum(0) - 1
    place_TE = row_TE + torch.arange(num_members, device=device) * capacity
    place_TE = place_TE.where(needed_TE, num_members * capacity)
    blocks = rows_TW.new_zeros((num_members * capacity + 1, rows_TW.shape[1]))
    blocks[place_TE] = rows_TW[:, None]
    return blocks[:-1], row_TE


class Labels:
    """Picks a rank's work out of rows that arrive with labels."""

    def __init__(self, *, placement: Placement, ep_rank: int) -> None:
        self._ep_size = placement.ep_size
        self._owner_X = np.array(placement.owners, dtype=np.int64)
        own = np.array(placement.experts_of(ep_rank), dtype=np.int64)
        self._num_own = len(own)
        self._own_index = np.full(placement.num_experts + 1, -1, dtype=np.int64)
        self._own_index[own + 1] = np.arange(len(own))

    def select(self, arrived_NW: torch.Tensor, topk_TK: torch.Tensor) -> Dispatched:
        """The pairs whose expert this rank owns; both ends list them by row, then by slot.

        The host reads the labels here: it has to know how many rows each expert gets.
        """
        top_k = topk_TK.shape[1]
        width = arrived_NW.shape[1] - top_k
        index_NK = self._own_index[labels_of(arrived_NW, top_k).cpu().numpy()]
        pair_P = np.flatnonzero(index_NK >= 0)
        expert_P = index_NK.ravel()[pair_P]
        order_R = np.argsort(expert_P, kind="stable")
        per_member = index_NK.reshape(self._ep_size, -1)
        owner = self._owner_X[topk_TK.cpu().numpy()].ravel()
        place = np.empty_like(owner)
        place[np.argsort(owner, kind="stable")] = np.arange(len(owner))
        return Dispatched(
            rows_ND=arrived_NW[:, :width],
            expert_counts=_counts(expert_P, self._num_own),
            reads_R=to_device(pair_P[order_R] // top_k, arrived_NW.device),
            writes_R=to_device(order_R, arrived_NW.device),
            place_TK=to_device(place, arrived_NW.device).view_as(topk_TK),
            sent=_counts(owner, self._ep_size),
            received=tuple((per_member >= 0).sum(1).tolist()),
        )


def check_capacity(num_rows: int, capacity: int) -> None:
    """ValueError where a rank brings more rows than were agreed: others expect no more."""
    if num_rows > capacity:
        raise ValueError(
            f"{num_rows} rows are to be dispatched, but the ranks agreed on at most {capacity} "
            "from each; was the forward pass given the agreed bound (max_rows)?"
        )


def places(counts: Sequence[int], blocks: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Where ``counts[i]`` rows lie that lead each block of ``blocks[i]``, on like's device."""
    count = np.array(counts, dtype=np.int64)
    block = np.array(blocks, dtype=np.int64)
    gap = (np.cumsum(block) - block) - (np.cumsum(count) - count)
    return to_device(np.arange(count.sum()) + np.repeat(gap, count), like.device)


def _counts(values: NDArray[np.int64], size: int) -> tuple[int, ...]:
    return tuple(np.bincount(values, minlength=size).tolist())
