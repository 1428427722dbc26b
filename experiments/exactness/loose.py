"""The same model in a plain loop, every part of it in any way, whether or not it keeps bits.

It has the weights, the norms and the routing of the exact one, and no frame around them: no
coroutine, no dispatch between ranks. Torch's attention finds keys and values of each sequence in
one piece. With our own way for everything the bits are the exact one's.

Shapes: B sequences, T rows of each, R = B * T rows, D hidden, H query heads, G key/value heads,
A = H + G, E head width, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from interlace.moe.checkpoint import Checkpoint
from interlace.moe.description import Description
from interlace.moe.norm import add_and_norm, rms_norm
from interlace.moe.paged_attention import turn_heads
from interlace.moe.tensor_names import TensorNames

from .exact import Exact, ExactParts, attention_of
from .shape import Shape
from .ways import OWN, Attended, LooseExperts, Product, Ways, attentions, products_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseLayer:
    qkv: dict[str, Product]
    o: dict[str, Product]
    experts: LooseExperts


class Loose:
    """All ways to compute the model; shares packed weights and cache with the exact one."""

    def __init__(self, folder: Path, exact: Exact) -> None:
        self._exact = exact
        checkpoint = Checkpoint(folder)
        names = TensorNames.find(checkpoint, exact.config)
        self.layers = [_layer(checkpoint, names, exact, i) for i in range(exact.config.num_layers)]
        head = checkpoint.read(names.head.name)
        self.head = products_of(head, exact.weights.head)

    def batch(self, shape: Shape) -> LooseBatch:
        return LooseBatch(self, self._exact, shape)


class LooseBatch:
    """One batch, with caches that hold random numbers behind it, the exact one's the same ones."""

    def __init__(self, model: Loose, exact: Exact, shape: Shape) -> None:
        self._model, self._exact, self._shape = model, exact, shape
        attention = attention_of(exact.weights.layers[0])
        self._sizes = attention.sizes
        self._eps = attention.rms_eps
        num_groups, width = self._sizes.num_kv_heads, self._sizes.head_dim
        size = (exact.config.num_layers, 2, shape.sequences, num_groups, shape.end, width)
        self._cache = torch.zeros(size, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(shape.start)
        behind = self._cache[..., : shape.start, :]
        behind.copy_(torch.randn(behind.shape, generator=generator))
        if shape.start:
            for index in range(exact.config.num_layers):
                key, value = behind[index].transpose(2, 3).flatten(1, 2).unbind(0)
                exact.cache.write(index, shape.slots_behind(), key=key, value=value)
        self._no_pages: Any = SimpleNamespace(
            width=width, num_heads=0, pool=self._cache, address=lambda _: self._cache.data_ptr()
        )

    def parts(self, description: Description) -> ExactParts:
        return self._exact.layer_parts(description)

    def attention_names(self) -> list[str]:
        return [OWN, *attentions(self._shape.rows)]

    def products(self, name: str, x_RD: torch.Tensor, heads_RX: torch.Tensor) -> None:
        for layer in self._model.layers:
            layer.qkv[name](x_RD)
            layer.o[name](heads_RX)

    def attention(self, name: str, qkv_RX: torch.Tensor, parts: ExactParts) -> None:
        for index in range(len(self._model.layers)):
            self._attend(name, index, qkv_RX, parts)

    def experts(self, name: str, h_RD: torch.Tensor) -> None:
        for layer, exact in zip(self._model.layers, self._exact.weights.layers, strict=True):
            layer.experts(name, h_RD, exact.mixture.route(h_RD))

    def forward(self, ways: Ways, description: Description) -> torch.Tensor:
        """[S, V] float32 logits of the sampled rows."""
        weights, eps = self._exact.weights, self._eps
        parts = self.parts(description)
        x_RD = weights.embed_VD.index_select(0, parts.batch.input_ids)
        for index, (layer, exact) in enumerate(
            zip(self._model.layers, weights.layers, strict=True)
        ):
            if ways.fused and exact.block is not None:
                x_RD, h_RD, routing = parts.whole_block(index, x_RD)
            else:
                qkv_RX = layer.qkv[ways.products](rms_norm(x_RD, exact.input_norm_D, eps))
                heads = self._attend(ways.attention, index, qkv_RX, parts)
                o_RD = layer.o[ways.products](heads)
                x_RD, h_RD = add_and_norm(x_RD, o_RD, exact.post_norm_D, factor=1, eps=eps)
                routing = exact.mixture.route(h_RD)
            x_RD = x_RD + layer.experts(ways.experts, h_RD, routing)
        rows = rms_norm(x_RD.index_select(0, parts.batch.sample_rows), weights.norm_D, eps)
        return self._model.head[ways.head](rows).float()

    def _attend(
        self,
        name: str,
        index: int,
        qkv_RX: torch.Tensor,
        parts: ExactParts,
    ) -> torch.Tensor:
        """[R, H * E]"""
        if name == OWN:
            return parts.attend(index, qkv_RX)
        shape, sizes = self._shape, self._sizes
        rotated = (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
        qk_RAE = turn_heads(  # keys too, as if they were queries
            qkv_RX[:, :rotated],
            parts.rotation,
            self._no_pages,
            index,
            parts.batch,
            norm_AE=attention_of(self._exact.weights.layers[index]).head_norm_AE,
            eps=self._eps,
        )
        per_sequence = (shape.sequences, shape.rows)
        q_BTHE, key_BTGE = qk_RAE.unflatten(0, per_sequence).split(
            (sizes.num_heads, sizes.num_kv_heads), dim=2
        )
        value = qkv_RX[:, rotated:].unflatten(1, (sizes.num_kv_heads, sizes.head_dim))
        key_BGLE, value_BGLE = self._cache[index]
        key_BGLE[:, :, shape.start :] = key_BTGE.transpose(1, 2)
        value_BGLE[:, :, shape.start :] = value.unflatten(0, per_sequence).transpose(1, 2)
        work = Attended(q_BTHE=q_BTHE, key_BGLE=key_BGLE, value_BGLE=value_BGLE, scale=sizes.scale)
        return attentions(shape.rows)[name](work).reshape(shape.num_rows, -1)


def _layer(checkpoint: Checkpoint, names: TensorNames, exact: Exact, index: int) -> LooseLayer:
    stored, own = names.layer(index), exact.weights.layers[index]
    qkv = torch.cat([checkpoint.read(stored[part].name) for part in ("q", "k", "v")])
    gates, downs = [], []
    for number in exact.weights.expert_ids:
        expert = names.expert(index, number)
        if names.experts.stacked:
            gates.append(checkpoint.read(expert["gate_up"].name, item=number))
            downs.append(checkpoint.read(expert["down"].name, item=number))
            continue
        both = [checkpoint.read(expert[part].name) for part in ("gate", "up")]
        gates.append(torch.cat(both))
        downs.append(checkpoint.read(expert["down"].name))
    return LooseLayer(
        qkv=products_of(qkv, attention_of(own).qkv),
        o=products_of(checkpoint.read(stored["o"].name), own.o),
        experts=LooseExperts(gates, downs, own.mixture),
    )
