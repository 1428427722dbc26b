"""One layer's experts on one rank: choosing, applying and adding up.

Shapes: T rows of this rank, D hidden, K experts a row goes to, R rows received, N outputs that come
back or rows received with their padding, X experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.comm.collectives import preemption_point

from . import kernels
from .apart import through
from .dispatch import Dispatched, Returned
from .dispatch_padded import Padded
from .experts import Expert, apply_experts, experts_apart
from .linear import Linear
from .norm import add
from .parts import Mixture
from .router import Routing, padded_sigmoid, route

PIECE_ROWS = 32
"""Most rows of a piece of work in torch: half a millisecond of a core or one, as long as a small
message travels. Products of half as many rows already run at full speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring rows of neighbouring experts."""

    rows: slice
    experts: slice
    counts: tuple[int, ...]
    """Rows of each of the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLayer:
    """Router and experts; the rows' way to them and back is a dispatcher's."""

    sizes: Mixture
    router: Linear
    router_bias_X: torch.Tensor | None
    """float32; added to the scores for the choice."""
    experts: tuple[Expert, ...]
    """This rank's own, in the order of `Weights.expert_ids`."""
    shared: Expert | None
    """The expert every row goes to; every rank has it whole."""
    shared_gate: Linear | None
    """What weights the shared expert's output, in its first column; the others are padding."""

    def route(self, h_TD: torch.Tensor) -> Routing:
        if self.sizes.router.precise:
            h_TD = h_TD.float()
        return route(self.router(h_TD), self.sizes.router, self.router_bias_X)

    def apply(self, dispatched: Dispatched | Padded) -> torch.Tensor:
        """[R, D] each row's expert applied to it; of padded rows [X, N, D], every expert to all."""
        if isinstance(dispatched, Padded):
            return apply_all(self.experts, dispatched.rows_ND)
        return apply_experts(
            self.experts,
            dispatched.rows_ND,
            dispatched.expert_counts,
            reads_R=dispatched.reads_R,
            writes_R=dispatched.writes_R,
        )

    async def apply_preemptibly(self, dispatched: Dispatched) -> torch.Tensor:
        """[R, D] the same bits, standing aside where another path waits."""
        num_rows = sum(dispatched.expert_counts)
        if num_rows <= PIECE_ROWS:
            return self.apply(dispatched)
        y_RD = dispatched.rows_ND.new_empty((num_rows, dispatched.rows_ND.shape[1]))
        apart = experts_apart(
            self.experts,
            dispatched.rows_ND,
            dispatched.expert_counts,
            reads_R=dispatched.reads_R,
            writes_R=dispatched.writes_R,
            out_ND=y_RD,
        )
        if apart is None:
            await self._apply_in_pieces(dispatched, y_RD)
        else:
            await through(apart)
        return y_RD

    async def _apply_in_pieces(self, dispatched: Dispatched, y_RD: torch.Tensor) -> None:
        """With preemption points between pieces of a millisecond at most."""
        pieces = pieces_of(dispatched.expert_counts, PIECE_ROWS)
        x_ND, reads_R, writes_R = dispatched.rows_ND, dispatched.reads_R, dispatched.writes_R
        reads = _cut(reads_R, pieces)
        writes = reads if writes_R is reads_R else _cut(writes_R, pieces)
        for piece, reads_R, writes_R in zip(pieces, reads, writes, strict=True):
            if piece.rows.start:
                await preemption_point()
            apply_experts(
                self.experts[piece.experts],
                x_ND[piece.rows] if reads_R is None else x_ND,
                piece.counts,
                reads_R=reads_R,
                writes_R=writes_R,
                out_ND=y_RD[piece.rows] if writes_R is None else y_RD,
            )

    def add_to(
        self,
        x_TD: torch.Tensor,
        h_TD: torch.Tensor,
        returned: Returned,
        weight_TK: torch.Tensor,
        factor: float,
    ) -> torch.Tensor:
        """[T, D] the residual with `factor` times the `total` added, to the bits of `add`."""
        if self.shared is None and kernels.can_read(returned.outputs_ND, x_TD):
            return _mix(returned, weight_TK, x_TD, factor)
        return add(x_TD, self.total(h_TD, returned, weight_TK), factor)

    def total(
        self, h_TD: torch.Tensor, returned: Returned, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] the outputs weighted in float32 and summed in slot order, the shared one last."""
        if self.shared is None and kernels.can_read(returned.outputs_ND):
            return _mix(returned, weight_TK)
        total = weighted_sum(returned.in_slots(), weight_TK)
        if self.shared is not None:
            shared_TD = self.shared(h_TD).float()
            if self.shared_gate is not None:
                shared_TD = shared_TD * padded_sigmoid(self.shared_gate(h_TD))[:, :1]
            total = total + shared_TD
        return total.to(h_TD.dtype)


def apply_all(experts: Sequence[Expert], x_ND: torch.Tensor) -> torch.Tensor:
    """[X, N, D] every expert applied to every row, to the bits of `apply_experts`."""
    y_XND = x_ND.new_empty((len(experts), *x_ND.shape))
    for y_ND, expert in zip(y_XND.unbind(), experts, strict=True):
        y_ND.copy_(expert(x_ND))
    return y_XND


def pieces_of(counts: Sequence[int], most: int) -> list[Piece]:
    """Rows sorted by expert, cut into pieces of at most `most`, neighbours together where they fit.

    Rows of one expert that are too many are cut evenly.
    """
    shares: list[list[tuple[int, int]]] = []
    room = 0
    for expert, count in enumerate(counts):
        num_cuts = -(-count // most)
        for cut in range(num_cuts):
            size = count // num_cuts + (cut < count % num_cuts)
            if size > room:
                shares.append([])
                room = most
            shares[-1].append((expert, size))
            room -= size
    pieces, first = [], 0
    for share in shares:
        sizes = dict(share)
        experts = slice(share[0][0], share[-1][0] + 1)
        rows = slice(first, first + sum(sizes.values()))
        own = tuple(sizes.get(expert, 0) for expert in range(experts.start, experts.stop))
        pieces.append(Piece(rows=rows, experts=experts, counts=own))
        first = rows.stop
    return pieces


def _cut(index_R: torch.Tensor | None, pieces: Sequence[Piece]) -> Sequence[torch.Tensor | None]:
    """Each piece's part of an index."""
    if index_R is None:
        return (None,) * len(pieces)
    parts: tuple[torch.Tensor, ...] = index_R.split([sum(piece.counts) for piece in pieces])
    return parts


def weighted_sum(y_TKD: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32"""
    weighted = y_TKD * weight_TK[:, :, None]
    total = weighted[:, 0]
    for slot in range(1, y_TKD.shape[1]):
        total = total + weighted[:, slot]
    return total


def _mix(
    returned: Returned,
    weight_TK: torch.Tensor,
    x_TD: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """`weighted_sum`, rounded to the outputs' type, and `add` to a residual, to the bit: one pass
    over the outputs where they are."""
    num_rows, top_k = weight_TK.shape
    outputs_ND, place_TK = returned.outputs_ND.contiguous(), returned.place_TK.contiguous()
    weight_TK = weight_TK.contiguous()
    width = outputs_ND.shape[1]
    if place_TK.shape != weight_TK.shape or (x_TD is not None and x_TD.shape != (num_rows, width)):
        raise ValueError(
            f"outputs of {width} for {tuple(place_TK.shape)} slots, but weights for "
            f"{tuple(weight_TK.shape)}" + ("" if x_TD is None else f", to add to {x_TD.shape}")
        )
    if x_TD is not None:
        x_TD = x_TD.contiguous()
    out_TD = outputs_ND.new_empty((num_rows, width))
    kernels.native.mix(
        outputs_ND.element_size(),
        out_TD.data_ptr(),
        0 if x_TD is None else x_TD.data_ptr(),
        outputs_ND.data_ptr(),
        place_TK.data_ptr(),
        weight_TK.data_ptr(),
        num_rows,
        top_k,
        width,
        factor,
    )
    return out_TD
