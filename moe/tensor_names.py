"""What the tensors of a checkpoint are called, in every layout that is understood."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ModelError

_HARMLESS = ("rotary_emb.inv_freq",)
"""Tensors old exporters leave in a layer that hold no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Everything of one layer but its experts."""

    input_norm: str
    post_norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str
    k_norm: str
    router: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """One expert: either `gate_up` or both `gate` and `up`."""

    gate_up: str | None = None
    gate: str = ""
    up: str = ""
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """One checkpoint's layout."""

    config: ModelConfig
    block: str
    """What a layer's experts and router are under."""
    stacked: bool
    """Whether a layer's experts are one tensor with the expert as its first dimension."""
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str

    @classmethod
    def hub(cls, config: ModelConfig) -> TensorNames:
        """The hub's layout: one tensor per expert."""
        return cls(
            config=config,
            block="block_sparse_moe" if config.architecture == "mixtral" else "mlp",
            stacked=False,
            head="model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight",
        )

    @classmethod
    def find(cls, checkpoint: Checkpoint, config: ModelConfig) -> TensorNames:
        """The layout of this checkpoint, told from a name only stacked experts have."""
        hub = cls.hub(config)
        if "model.layers.0.mlp.experts.gate_up_proj" in checkpoint:
            return replace(hub, block="mlp", stacked=True)
        return hub

    def layer(self, index: int) -> LayerNames:
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        return LayerNames(
            input_norm=f"{prefix}.input_layernorm.weight",
            post_norm=f"{prefix}.post_attention_layernorm.weight",
            q=f"{attention}.q_proj.weight",
            k=f"{attention}.k_proj.weight",
            v=f"{attention}.v_proj.weight",
            o=f"{attention}.o_proj.weight",
            q_norm=f"{attention}.q_norm.weight",
            k_norm=f"{attention}.k_norm.weight",
            router=f"{prefix}.{self.block}.gate.weight",
        )

    def expert(self, layer: int, expert: int) -> ExpertNames:
        prefix = f"model.layers.{layer}.{self.block}.experts"
        if self.stacked:
            return ExpertNames(gate_up=f"{prefix}.gate_up_proj", down=f"{prefix}.down_proj")
        if self.config.architecture == "mixtral":
            gate, up, down = (f"{prefix}.{expert}.{name}.weight" for name in ("w1", "w3", "w2"))
        else:
            gate, up, down = (
                f"{prefix}.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")
            )
        return ExpertNames(gate=gate, up=up, down=down)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor the model has, with its shape."""
        config = self.config
        yield self.embed, (config.vocab_size, config.hidden_size)
        yield self.norm, (config.hidden_size,)
        if not config.tie_embeddings:
            yield self.head, (config.vocab_size, config.hidden_size)
        for index in range(config.num_layers):
            yield from self._layer_shapes(index)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises `ModelError` for a missing, misshapen, unreadable or unexplained tensor."""
        expected = dict(self.shapes())
        for name, shape in expected.items():
            checkpoint.require(name, shape)
        for name in sorted(checkpoint.headers):
            if re.match(r"model\.layers\.", name) and name not in expected:
                if name.endswith(_HARMLESS):
                    continue
                raise ModelError(
                    f"{checkpoint.headers[name].file}: tensor {name} has no place in a "
                    f"{self.config.architecture} of {self.config.num_layers} layers and "
                    f"{self.config.num_experts} experts; config.json may belong to another model"
                )

    def _layer_shapes(self, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        config, names = self.config, self.layer(index)
        hidden, width = config.hidden_size, config.head_dim
        yield names.input_norm, (hidden,)
        yield names.post_norm, (hidden,)
        yield names.q, (config.num_heads * width, hidden)
        yield names.k, (config.num_kv_heads * width, hidden)
        yield names.v, (config.num_kv_heads * width, hidden)
        yield names.o, (hidden, config.num_heads * width)
        if config.qk_norm:
            yield names.q_norm, (width,)
            yield names.k_norm, (width,)
        yield names.router, (config.num_experts, hidden)
        experts = (config.num_experts,) if self.stacked else ()
        for expert in range(1 if self.stacked else config.num_experts):
            tensors = self.expert(index, expert)
            yield tensors.down, (*experts, hidden, config.expert_size)
            if tensors.gate_up is not None:
                yield tensors.gate_up, (*experts, 2 * config.expert_size, hidden)
            else:
                yield tensors.gate, (config.expert_size, hidden)
                yield tensors.up, (config.expert_size, hidden)
