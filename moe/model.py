"""The forward pass of every architecture, suspended at every collective.

Under tensor parallelism the residual rows are sharded: rows are gathered before they become heads,
heads are split inside attention, heads are exchanged back for rows, and the output projection,
norms, router, shared experts and dispatch work on a rank's own rows. Where dispatch is `replicated`
every rank has all rows instead: heads are gathered, and what stands around them is computed by all.
No sum crosses ranks.

Shapes: T rows (padded to equal shares), U this rank's share of them, D hidden, H query heads of
this rank, E their width, X what is gathered of a row, K top-k, L layers with experts, S sampled
rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from interlace.comm.collectives import Exchange, Gather, perform, preemption_point

from .batch import Batch
from .bucket import padded, rounded
from .config import ModelConfig
from .context import PathContext
from .description import Description
from .dispatch import Dispatched, Dispatcher
from .dispatch_strategy import dispatcher_of
from .ends import End, rotation_of, rows_of
from .mixture import PIECE_ROWS, MixtureLayer
from .norm import add, add_and_norm, rms_norm
from .router import Routing
from .weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What a forward pass found; the same on every tensor-parallel rank. Where batches are padded,
    what belongs to padding lies behind what was asked for."""

    logits_SV: torch.Tensor
    """float32 logits of the sampled rows."""
    experts_TLK: torch.Tensor
    """Experts every row went to in the layers that have some, most likely first: uint8, or int16
    beyond 256 experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the host makes of a description before a pass computes."""

    batch: Batch
    dispatcher: Dispatcher[Any]


class Model:
    """The arithmetic of one architecture; holds sizes only, no weights and no state."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._id_dtype = torch.uint8 if config.num_experts <= 256 else torch.int16

    async def forward(
        self,
        weights: Weights,
        context: PathContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ForwardOutput:
        """Write the rows' keys and values and return the sampled rows' logits.

        `max_rows` is an agreed number: no rank's description has more rows. The strategies `fixed`
        and `gather` need it.

        Suspends on the same (kind, role, stage) sequence for every description, the empty one
        included. Within one weights version a row's bits depend only on the tokens before it and
        its own. Raises ValueError when weights, context and description do not fit together; what
        was written to the cache before an error is unspecified.
        """
        prepared = self.prepare(weights, context, description, max_rows=max_rows)
        return await self.compute(weights, context, prepared)

    def prepare(
        self, weights: Weights, context: PathContext, description: Description, *, max_rows: int = 0
    ) -> Prepared:
        """The host's part of `forward`, which comes first: errors are raised, numbers uploaded."""
        self._check(weights, context, description)
        if context.buckets:
            max_rows = rounded(max_rows)
            description = padded(description, max_rows)
        tp_size, pages = 1 if context.replicated else context.tp_size, context.kv.pages
        if pages is not None:
            batch = Batch.in_pages(description, pages, tp_size=tp_size)
        else:
            batch = Batch.build(
                description,
                tp_size=tp_size,
                device=weights.device,
                whole_tables=context.buckets,
            )
        dispatcher = dispatcher_of(
            context.dispatch,
            placement=context.expert_placement,
            ep_rank=context.ep_rank,
            capacity=-(-max_rows // context.tp_size),
            waits=context.waits,
            device=weights.device,
        )
        context.kv.copy_blocks(description.block_copies)
        return Prepared(batch=batch, dispatcher=dispatcher)

    async def compute(
        self, weights: Weights, context: PathContext, prepared: Prepared
    ) -> ForwardOutput:
        """The device's part of `forward`. Unless the path `waits`, the host reads nothing in it and
        gives nothing in: it can be captured, and serves all batches of the same shape."""
        batch, dispatcher = prepared.batch, prepared.dispatcher
        rotation = self.rotation(weights, batch)
        x_UD = self.embed(weights, batch)
        straight = weights.straight
        if straight is not None and straight.fits(context):
            crossing = await perform(straight.stretch)
            if crossing is not None:
                x_TD = x_UD.contiguous()
                asked_S, topk_LTK = straight.begin(crossing, context, x_TD, rotation, batch)
                if asked_S is None and not batch.samples_all:
                    await straight.through(crossing)
                    end = self.end(weights, x_TD.index_select(0, batch.sample_rows), topk_LTK)
                else:
                    end = self.end(weights, x_TD[: batch.sample_rows.shape[0]], topk_LTK)
                    await straight.through(crossing)
                logits_SV, experts_TLK = end()
                return ForwardOutput(logits_SV=logits_SV, experts_TLK=experts_TLK)
        shares = _Shares(batch, context)
        x_UD = x_UD[shares.mine]
        chosen: list[torch.Tensor] = []
        in_pieces = context.preemptible and batch.num_rows >= PIECE_ROWS
        pages = None if context.tp_size > 1 else context.kv.pages
        rows: slice | torch.Tensor | None = shares.real
        for index, layer in enumerate(weights.layers):
            if index == len(weights.layers) - 1 and context.waits:
                rows = shares.asked(batch)
            if layer.block is not None and pages is not None:
                given = x_UD, rotation, pages, index, batch
                if in_pieces:
                    x_UD, h_UD, routing = await layer.block.preemptibly(*given, owner=layer)
                else:
                    x_UD, h_UD, routing = layer.block(*given)
                x_UD = await self._mix(layer, context, dispatcher, index, x_UD, h_UD, routing, rows)
                chosen.append(routing.topk_TK)
                continue
            rows_TX = self.pre_attention(layer, x_UD)
            if shares.split:
                rows_TX = torch.cat(
                    await perform(Gather(role="tp", stage=f"{index}.rows", payload=rows_TX))
                )
            q_THE = layer.attention.queries(context, batch, index, rows_TX, rotation)
            if in_pieces:
                await preemption_point()
            heads = self.attend(layer, context, batch, index, q_THE)
            if in_pieces and context.tp_size == 1:
                await preemption_point()
            if context.replicated and context.tp_size > 1:
                parts = await perform(Gather(role="tp", stage=f"{index}.heads", payload=heads))
                heads = torch.cat(parts, dim=1)
            elif context.tp_size > 1:
                heads = shares.own_rows(
                    await perform(
                        Exchange(
                            role="tp",
                            stage=f"{index}.heads",
                            payload=heads,
                            send=shares.equal,
                            recv=shares.equal,
                        )
                    )
                )
            x_UD, h_UD = self.post_attention(layer, x_UD, heads)
            if isinstance(layer.feed_forward, MixtureLayer):
                routing = layer.feed_forward.route(h_UD)
                x_UD = await self._mix(layer, context, dispatcher, index, x_UD, h_UD, routing, rows)
                chosen.append(routing.topk_TK)
            else:
                x_UD = self.add(x_UD, layer.feed_forward(h_UD))
        experts_TLK = self.stack_experts(chosen, batch.num_padded_rows)
        if shares.split:
            x_UD = torch.cat(await perform(Gather(role="tp", stage="final.rows", payload=x_UD)))
        if shares.split and chosen:
            experts_TLK = torch.cat(
                await perform(Gather(role="tp", stage="final.experts", payload=experts_TLK))
            )
        logits_SV = self.logits(weights, x_UD.index_select(0, batch.sample_rows))
        if context.tp_size > 1:
            payload = logits_SV.to(weights.dtype)  # what it was rounded to
            parts = await perform(Gather(role="tp", stage="final.logits", payload=payload))
            logits_SV = torch.cat(parts, dim=1)[:, : self.config.vocab_size].float()
        return ForwardOutput(logits_SV=logits_SV, experts_TLK=experts_TLK[: batch.num_rows])

    def embed(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """[T, D]"""
        x_TD = rows_of(weights.embed_VD, batch.input_ids)
        multiplier = self.config.multipliers.embedding
        return x_TD if multiplier == 1 else x_TD * multiplier

    def rotation(self, weights: Weights, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """[real T, 1, E] cosines and signed sines of the rows' positions."""
        positions = batch.positions
        if batch.num_padded_rows > batch.num_rows:
            positions = positions[: batch.num_rows]
        return rotation_of(weights.cos_PE, weights.sin_PE, positions)

    def pre_attention(self, layer: LayerWeights, x_UD: torch.Tensor) -> torch.Tensor:
        """[U, X]"""
        return layer.attention.own_rows(self._norm(x_UD, layer.input_norm_D))

    def attend(
        self,
        layer: LayerWeights,
        context: PathContext,
        batch: Batch,
        index: int,
        q_THE: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H * value width], zero in padding rows."""
        heads = layer.attention.attend(context, batch, index, q_THE)
        padding = batch.num_padded_rows - batch.num_rows
        return F.pad(heads, (0, 0, 0, padding)) if padding else heads

    def post_attention(
        self, layer: LayerWeights, x_UD: torch.Tensor, heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual with attention added, and its norm."""
        return add_and_norm(
            x_UD,
            layer.o(heads),
            layer.post_norm_D,
            factor=self.config.multipliers.residual,
            eps=self.config.rms_eps,
        )

    def add(self, x_UD: torch.Tensor, y_UD: torch.Tensor) -> torch.Tensor:
        """The residual with a block's output added."""
        return add(x_UD, y_UD, self.config.multipliers.residual)

    def stack_experts(self, chosen: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
        """[U, L, K]; without experts [num_rows, 0, 0]"""
        if not chosen:
            return torch.empty((num_rows, 0, 0), dtype=self._id_dtype)
        return torch.stack(tuple(chosen), dim=1).to(self._id_dtype)

    def logits(self, weights: Weights, x_SD: torch.Tensor) -> torch.Tensor:
        """[S, this rank's vocabulary] in float32"""
        return self.end(weights, x_SD.contiguous())()[0]

    def end(
        self, weights: Weights, x_SD: torch.Tensor, topk_LTK: torch.Tensor | None = None
    ) -> End:
        """Logits of these rows, and experts of all, once they are there."""
        return End(
            x_SD,
            weights.norm_D,
            weights.head,
            topk_LTK,
            eps=self.config.rms_eps,
            multiplier=self.config.multipliers.logits,
            id_dtype=self._id_dtype,
        )

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, self.config.rms_eps)

    async def _mix(
        self,
        layer: LayerWeights,
        context: PathContext,
        dispatcher: Dispatcher[Any],
        index: int,
        x_UD: torch.Tensor,
        h_UD: torch.Tensor,
        routing: Routing,
        rows: slice | torch.Tensor | None,
    ) -> torch.Tensor:
        """[U, D] the residual with what the experts add to these rows, all if it is None."""
        mixture, stage = layer.mixture, f"{index}"
        x_TD, h_TD, topk_TK, weight_TK = x_UD, h_UD, routing.topk_TK, routing.weight_TK
        if rows is not None:
            x_TD, h_TD = x_TD[rows], h_TD[rows]
            topk_TK, weight_TK = topk_TK[rows], weight_TK[rows]
        dispatched = await dispatcher.dispatch(stage, h_TD, topk_TK)
        if context.preemptible and isinstance(dispatched, Dispatched):
            y_RD = await mixture.apply_preemptibly(dispatched)
        else:
            y_RD = mixture.apply(dispatched)
        returned = await dispatcher.combine(stage, y_RD, dispatched)
        factor = self.config.multipliers.residual
        sum_TD = mixture.add_to(x_TD, h_TD, returned, weight_TK, factor)
        if rows is None:
            return sum_TD
        x_UD = x_UD.clone()
        x_UD[rows] = sum_TD
        return x_UD

    def _check(self, weights: Weights, context: PathContext, description: Description) -> None:
        last = max(description.positions, default=0)
        if last >= self.config.max_positions:
            raise ValueError(
                f"path {context.path} has a row at position {last}, the model has "
                f"{self.config.max_positions} positions"
            )
        if context.replicated and (context.tp_rank, context.tp_size) != (
            context.ep_rank,
            context.ep_size,
        ):
            raise ValueError(
                f"path {context.path} is tensor-parallel rank {context.tp_rank} of "
                f"{context.tp_size} and has experts as rank {context.ep_rank} of "
                f"{context.ep_size}: where rows are replicated both are one group"
            )
        if (weights.tp_rank, weights.tp_size) != (context.tp_rank, context.tp_size):
            raise ValueError(
                f"path {context.path} is tensor-parallel rank {context.tp_rank} of "
                f"{context.tp_size}, the weights are of rank {weights.tp_rank} of {weights.tp_size}"
            )
        own = context.expert_placement.experts_of(context.ep_rank)
        if context.expert_placement.ep_size != context.ep_size or own != weights.expert_ids:
            raise ValueError(
                f"path {context.path} places experts {own} on rank {context.ep_rank} of "
                f"{context.ep_size}, the weights hold {weights.expert_ids}"
            )


class _Shares:
    """How the rows of a batch are shared out over the tensor-parallel ranks: each has its part, or
    all have all."""

    def __init__(self, batch: Batch, context: PathContext) -> None:
        self.split = context.tp_size > 1 and not context.replicated
        self._tp_size = context.tp_size if self.split else 1
        self._share = batch.num_padded_rows // self._tp_size
        first = context.tp_rank * self._share if self.split else 0
        self.mine = slice(first, first + self._share)
        num_own = min(max(batch.num_rows - first, 0), self._share)
        self.real = slice(num_own) if num_own < self._share else None
        """Rows of the share that are no padding; only those are dispatched. None: all."""
        self.equal = (self._share,) * self._tp_size

    def asked(self, batch: Batch) -> slice | torch.Tensor | None:
        """Rows whose output is asked for. In the last layer others need no experts: a prompt's last
        row is all that becomes a token."""
        rows, first = batch.sample_rows, self.mine.start
        if self.split:
            rows = rows[(rows >= first) & (rows < self.mine.stop)] - first
        return rows if len(rows) < self._share else self.real

    def own_rows(self, parts: torch.Tensor) -> torch.Tensor:
        """[U, all heads * E] from every rank's heads for this rank's rows, stacked by rank."""
        by_rank = parts.unflatten(0, (self._tp_size, self._share))
        heads: torch.Tensor = by_rank.transpose(0, 1).flatten(1)
        return heads
