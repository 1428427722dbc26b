"""The model as ranks run it, whole and in parts: every row's bits are its own."""

from __future__ import annotations

from pathlib import Path

import torch

from interlace.moe.config import ModelConfig
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.grouped_query import GroupedQueryAttention
from interlace.moe.kv_cache import KVCache, attention_planes
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.paged_attention import paged_attention, turn_heads
from interlace.moe.placement import Placement
from interlace.moe.program import run_alone
from interlace.moe.router import Routing
from interlace.moe.weights import LayerWeights, Weights, load_weights


class Exact:
    """One rank that has the whole model, with a cache."""

    def __init__(self, folder: Path, config: ModelConfig, num_blocks: int) -> None:
        self.config = config
        placement = Placement.contiguous(config.num_experts, 1)
        self.weights: Weights = load_weights(
            folder, config, expert_ids=placement.experts_of(0), dtype=torch.bfloat16
        )
        self.cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            planes=attention_planes(config),
            dtype=torch.bfloat16,
        )
        self.context = PathContext(path="exact", kv=self.cache, expert_placement=placement)
        self.model = Model(config)

    def forward(self, description: Description) -> torch.Tensor:
        """[S, V] logits of the sampled rows."""
        output = run_alone(self.model.forward(self.weights, self.context, description))
        assert isinstance(output, ForwardOutput)
        return output.logits_SV

    def layer_parts(self, description: Description) -> ExactParts:
        return ExactParts(self, description)


class ExactParts:
    """The layers' parts for one batch, to be timed apart."""

    def __init__(self, exact: Exact, description: Description) -> None:
        prepared = exact.model.prepare(exact.weights, exact.context, description)
        self.batch, self._dispatcher = prepared.batch, prepared.dispatcher
        self._exact = exact
        self.rotation = exact.model.rotation(exact.weights, self.batch)

    def products(self, x_TD: torch.Tensor, heads_TX: torch.Tensor) -> None:
        """Of all layers: those before and behind attention."""
        for layer in self._exact.weights.layers:
            attention_of(layer).qkv(x_TD)
            layer.o(heads_TX)

    def attention(self, qkv_TX: torch.Tensor) -> None:
        for index in range(len(self._exact.weights.layers)):
            self.attend(index, qkv_TX)

    def attend(self, index: int, qkv_TX: torch.Tensor) -> torch.Tensor:
        """[T, H * E] of one layer, from projected rows."""
        pages = self._exact.cache.pages
        assert pages is not None
        attention = attention_of(self._exact.weights.layers[index])
        q_THE = turn_heads(
            qkv_TX,
            self.rotation,
            pages,
            index,
            self.batch,
            norm_AE=attention.head_norm_AE,
            eps=attention.rms_eps,
        )
        scale = attention.sizes.scale
        return paged_attention(q_THE, pages, index, self.batch, scale=scale).flatten(1)

    def whole_block(
        self, index: int, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """All of a layer up to its experts in one call: residual, its norm, who they go to."""
        pages, block = self._exact.cache.pages, self._exact.weights.layers[index].block
        assert pages is not None
        assert block is not None
        return block(x_TD, self.rotation, pages, index, self.batch)

    def experts(self, h_TD: torch.Tensor) -> None:
        """Routing, the way to the experts, the experts, the way back and the sum."""
        for index in range(len(self._exact.weights.layers)):
            run_alone(self._mix(index, h_TD))

    async def _mix(self, index: int, h_TD: torch.Tensor) -> torch.Tensor:
        mixture = self._exact.weights.layers[index].mixture
        routing = mixture.route(h_TD)
        dispatched = await self._dispatcher.dispatch(f"{index}", h_TD, routing.topk_TK)
        y_RD = mixture.apply(dispatched)
        returned = await self._dispatcher.combine(f"{index}", y_RD, dispatched)
        return mixture.total(h_TD, returned, routing.weight_TK)


def attention_of(layer: LayerWeights) -> GroupedQueryAttention:
    assert isinstance(layer.attention, GroupedQueryAttention)
    return layer.attention
