"""The forward pass of Mixtral and Qwen3-MoE, suspended at every collective.

Under tensor parallelism the residual rows are sharded: rows are gathered before the query, key
and value projection, heads are split inside attention, heads are exchanged back for rows, and the
output projection, norms, router and dispatch work on a rank's own rows. No sum crosses ranks.

Shapes: T rows (padded to equal shares), U this rank's share of them, D hidden, H query heads and
G key/value heads of this rank, A = H + G, E head width, K top-k, L layers, S sampled rows,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from interlace.comm.collectives import Exchange, Gather, perform

from .attention import block_attention
from .batch import Batch
from .config import ModelConfig
from .context import PathContext
from .description import Description
from .dispatch import Dispatched
from .dispatch_strategy import dispatcher_of
from .experts import apply_experts
from .router import Routing, route
from .weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What a forward pass found; the same on every tensor-parallel rank."""

    logits_SV: torch.Tensor
    """float32 logits of the sampled rows."""
    experts_TLK: torch.Tensor
    """Experts every row went to, most likely first: uint8, or int16 beyond 256 experts."""


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
        self._check(weights, context, description)
        batch = Batch.build(description, tp_size=context.tp_size, device=weights.device)
        shares = _Shares(batch, context)
        dispatcher = dispatcher_of(
            context.dispatch,
            placement=context.expert_placement,
            ep_rank=context.ep_rank,
            capacity=-(-max_rows // context.tp_size),
        )
        context.kv.copy_blocks(description.block_copies)
        cos_T1E, sin_T1E = self.rotation(weights, batch)
        x_UD = self.embed(weights, batch)[shares.mine]
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(weights.layers):
            h_TD = self.input_norm(layer, x_UD)
            if context.tp_size > 1:
                h_TD = torch.cat(
                    await perform(Gather(role="tp", stage=f"{index}.rows", payload=h_TD))
                )
            q_THE = self.pre_attention(layer, context, batch, index, h_TD, cos_T1E, sin_T1E)
            heads = self.attend(context, batch, index, q_THE)
            if context.tp_size > 1:
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
            x_UD, h_UD, routing = self.post_attention(layer, x_UD, heads)
            dispatched = await dispatcher.dispatch(
                f"{index}", h_UD[: shares.num_own], routing.topk_TK[: shares.num_own]
            )
            y_RD = self.experts(layer, dispatched)
            y_UKD = await dispatcher.combine(f"{index}", y_RD, dispatched)
            x_UD = self.merge(x_UD, y_UKD, routing)
            chosen.append(routing.topk_TK)
        experts_ULK = self.stack_experts(chosen)
        if context.tp_size > 1:
            x_UD = torch.cat(await perform(Gather(role="tp", stage="final.rows", payload=x_UD)))
            experts_ULK = torch.cat(
                await perform(Gather(role="tp", stage="final.experts", payload=experts_ULK))
            )
        logits_SV = self.logits(weights, x_UD, batch)
        if context.tp_size > 1:
            parts = await perform(Gather(role="tp", stage="final.logits", payload=logits_SV))
            logits_SV = torch.cat(parts, dim=1)[:, : self.config.vocab_size]
        return ForwardOutput(logits_SV=logits_SV.float(), experts_TLK=experts_ULK[: batch.num_rows])

    def embed(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """[T, D]"""
        return weights.embed_VD.index_select(0, batch.input_ids)

    def rotation(self, weights: Weights, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, E] cosines and signed sines of the rows' positions."""
        cos_TE = weights.cos_PE.index_select(0, batch.positions)
        sin_TE = weights.sin_PE.index_select(0, batch.positions)
        return cos_TE[:, None], sin_TE[:, None]

    def input_norm(self, layer: LayerWeights, x_UD: torch.Tensor) -> torch.Tensor:
        return self._norm(x_UD, layer.input_norm_D)

    def pre_attention(
        self,
        layer: LayerWeights,
        context: PathContext,
        batch: Batch,
        index: int,
        h_TD: torch.Tensor,
        cos_T1E: torch.Tensor,
        sin_T1E: torch.Tensor,
    ) -> torch.Tensor:
        """[real T, H, E] queries; writes the rows' keys and values. Padding rows stop here."""
        config = self.config
        num_kv_heads = config.num_kv_heads // context.tp_size
        qkv = layer.qkv(h_TD)[: batch.num_rows]
        qkv = qkv.view(batch.num_rows, qkv.shape[1] // config.head_dim, config.head_dim)
        qk_TAE, value_TGE = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        qk_TAE = qk_TAE.float()
        if layer.qk_norm_AE is not None:
            qk_TAE = F.rms_norm(qk_TAE, (config.head_dim,), None, config.rms_eps)
            qk_TAE = qk_TAE * layer.qk_norm_AE
        qk_TAE = rotate(qk_TAE, cos_T1E[: batch.num_rows], sin_T1E[: batch.num_rows])
        qk_TAE = qk_TAE.to(value_TGE.dtype)
        context.kv.write(index, batch.slot_mapping, key=qk_TAE[:, -num_kv_heads:], value=value_TGE)
        return qk_TAE[:, :-num_kv_heads]

    def attend(
        self, context: PathContext, batch: Batch, index: int, q_THE: torch.Tensor
    ) -> torch.Tensor:
        """[T, H * E], zero in padding rows."""
        key, value = context.kv.plane(index, "key"), context.kv.plane(index, "value")
        heads = block_attention(q_THE, key, value, batch).flatten(1)
        padding = batch.num_padded_rows - batch.num_rows
        return F.pad(heads, (0, 0, 0, padding)) if padding else heads

    def post_attention(
        self, layer: LayerWeights, x_UD: torch.Tensor, heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """The residual with attention added, its norm, and where that is routed."""
        x_UD = x_UD + layer.o(heads)
        h_UD = self._norm(x_UD, layer.post_norm_D)
        routing = route(
            layer.router(h_UD), top_k=self.config.top_k, norm_topk=self.config.norm_topk
        )
        return x_UD, h_UD, routing

    def experts(self, layer: LayerWeights, dispatched: Dispatched) -> torch.Tensor:
        """[R, D]"""
        return apply_experts(layer.experts, dispatched.rows_RD, dispatched.expert_counts)

    def merge(self, x_UD: torch.Tensor, y_UKD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The residual plus the experts' outputs, weighted in float32 and summed in slot order."""
        num_own = y_UKD.shape[0]
        weighted = y_UKD * routing.weight_TK[:num_own, :, None]
        total = weighted[:, 0]
        for slot in range(1, self.config.top_k):
            total = total + weighted[:, slot]
        padding = x_UD.shape[0] - num_own
        total = total.to(x_UD.dtype)
        return x_UD + (F.pad(total, (0, 0, 0, padding)) if padding else total)

    def stack_experts(self, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        """[U, L, K]"""
        return torch.stack(tuple(chosen), dim=1).to(self._id_dtype)

    def logits(self, weights: Weights, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[S, this rank's vocabulary]"""
        return weights.head(self._norm(x_TD.index_select(0, batch.sample_rows), weights.norm_D))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, self.config.rms_eps)

    def _check(self, weights: Weights, context: PathContext, description: Description) -> None:
        last = max(description.positions, default=0)
        if last >= self.config.max_positions:
            raise ValueError(
                f"path {context.path} has a row at position {last}, the model has "
                f"{self.config.max_positions} positions"
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
    """How the rows of a batch are shared out over the tensor-parallel ranks."""

    def __init__(self, batch: Batch, context: PathContext) -> None:
        self._tp_size = context.tp_size
        self._share = batch.num_padded_rows // context.tp_size
        first = context.tp_rank * self._share
        self.mine = slice(first, first + self._share)
        self.num_own = min(max(batch.num_rows - first, 0), self._share)
        """Rows of the share that are real; only those are dispatched."""
        self.equal = (self._share,) * context.tp_size

    def own_rows(self, parts: torch.Tensor) -> torch.Tensor:
        """[U, all heads * E] from every rank's heads for this rank's rows, stacked by rank."""
        by_rank = parts.unflatten(0, (self._tp_size, self._share))
        heads: torch.Tensor = by_rank.transpose(0, 1).flatten(1)
        return heads


def rotate(x_TAE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves paired: ``x cos + swap(x) sin``, sin negative in the first half.

    Products and sum are separate operations: fused ones round differently in a row's tail.
    """
    half = x_TAE.shape[-1] // 2
    return (x_TAE * cos_T1E).add_(torch.roll(x_TAE, half, dims=-1).mul_(sin_T1E))
