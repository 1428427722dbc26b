"""What the tensors of a checkpoint are called, in every layout that is understood.

A layer's tensors are listed by what they are: input_norm, post_norm, o, router, router_bias;
q, k, v with q_bias, k_bias, v_bias, q_norm, k_norm in grouped-query attention; q or q_down, q_norm,
q_up, then kv_down, kv_norm, kv_up in latent attention; gate, up, down of a dense layer, shared.gate
and so on of the shared expert, and shared_gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ModelError
from .expert_names import ExpertNames
from .parts import GroupedQuery, Latent

_HARMLESS = ("rotary_emb.inv_freq",)
"""Tensors old exporters leave in a layer that hold no weights."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a checkpoint."""

    name: str
    shape: Shape


Layer = dict[str, Stored]


class TensorNames:
    """One checkpoint's layout: every tensor the model has, with its shape."""

    def __init__(self, config: ModelConfig, experts: ExpertNames) -> None:
        self.config = config
        self.experts = experts
        rows = (config.vocab_size, config.hidden_size)
        self.embed = Stored(name="model.embed_tokens.weight", shape=rows)
        self.norm = Stored(name="model.norm.weight", shape=(config.hidden_size,))
        tied = config.tie_embeddings
        self.head = self.embed if tied else Stored(name="lm_head.weight", shape=rows)

    @classmethod
    def hub(cls, config: ModelConfig) -> TensorNames:
        """The hub's layout."""
        return cls(config, ExpertNames.hub(config.architecture))

    @classmethod
    def find(cls, checkpoint: Checkpoint, config: ModelConfig) -> TensorNames:
        """The layout of this checkpoint, told from a name only one of them has."""
        first = config.moe_layers[0] if config.moe_layers else 0
        return cls(config, ExpertNames.find(checkpoint, config.architecture, first))

    def layer(self, index: int) -> Layer:
        """Everything of one layer but its experts."""
        config, prefix = self.config, f"model.layers.{index}"
        hidden = (config.hidden_size,)
        found: dict[str, tuple[str, Shape]] = {
            "input_norm": ("input_layernorm", hidden),
            "post_norm": ("post_attention_layernorm", hidden),
        }
        match config.attention:
            case GroupedQuery():
                found |= _grouped_query(config.attention, config.hidden_size)
            case Latent():
                found |= _latent(config.attention, config.hidden_size)
        if index in config.moe_layers:
            found |= self._mixture()
        else:
            found |= _mlp("", "mlp", config.hidden_size, config.dense_size)
        return {
            part: Stored(name=_with_suffix(f"{prefix}.{name}"), shape=shape)
            for part, (name, shape) in found.items()
        }

    def expert(self, layer: int, number: int) -> Layer:
        """One expert's gate, up and down; or the gate_up and down of all experts of the layer."""
        assert self.config.mixture is not None
        sizes = self.config.mixture
        hidden, width = self.config.hidden_size, sizes.expert_size
        names = self.experts.of(layer, number)
        if self.experts.stacked:
            shapes: dict[str, Shape] = {
                "down": (sizes.num_experts, hidden, width),
                "gate_up": (sizes.num_experts, 2 * width, hidden),
            }
        else:
            shapes = {"down": (hidden, width), "gate": (width, hidden), "up": (width, hidden)}
        return {part: Stored(name=names[part], shape=shape) for part, shape in shapes.items()}

    def all(self) -> Iterator[Stored]:
        """Every tensor the model has."""
        yield self.embed
        yield self.norm
        if not self.config.tie_embeddings:
            yield self.head
        for index in range(self.config.num_layers):
            yield from self.layer(index).values()
            if index in self.config.moe_layers:
                for number in range(1 if self.experts.stacked else self.config.num_experts):
                    yield from self.expert(index, number).values()

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises `ModelError` for a missing, misshapen, unreadable or unexplained tensor."""
        lora = next((name for name in sorted(checkpoint.headers) if ".lora_" in name), None)
        if lora is not None:
            raise ModelError(
                f"{checkpoint.headers[lora].file}: tensor {lora} belongs to a LoRA adapter; "
                f"supported are whole models: merge it first (peft's merge_and_unload)"
            )
        expected = {tensor.name: tensor.shape for tensor in self.all()}
        for name, shape in expected.items():
            checkpoint.require(name, shape)
        for name in sorted(checkpoint.headers):
            if name not in expected and self._is_unexplained(name):
                raise ModelError(
                    f"{checkpoint.headers[name].file}: tensor {name} has no place in a "
                    f"{self.config.architecture} of {self.config.num_layers} layers and "
                    f"{self.config.num_experts} experts; config.json may belong to another model"
                )

    def is_spare(self, name: str) -> bool:
        """Whether a tensor that the model has not is one that exporters leave in: what rotary
        embeddings are made from, and layers that predict further tokens."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        behind = int(found[1]) - self.config.num_layers if found else -1
        return name.endswith(_HARMLESS) or 0 <= behind < self.config.num_prediction_layers

    def _is_unexplained(self, name: str) -> bool:
        return name.startswith("model.layers.") and not self.is_spare(name)

    def _mixture(self) -> dict[str, tuple[str, Shape]]:
        mixture, hidden = self.config.mixture, self.config.hidden_size
        assert mixture is not None
        found: dict[str, tuple[str, Shape]] = {
            "router": (self.experts.router, (mixture.num_experts, hidden))
        }
        if mixture.router.bias:
            found["router_bias"] = ("mlp.gate.e_score_correction_bias", (mixture.num_experts,))
        if mixture.shared_size:
            inside = "mlp.shared_expert" if mixture.shared_gate else "mlp.shared_experts"
            found |= _mlp("shared.", inside, hidden, mixture.shared_size)
        if mixture.shared_gate:
            found["shared_gate"] = ("mlp.shared_expert_gate", (1, hidden))
        return found


def _with_suffix(name: str) -> str:
    return name if name.endswith("bias") else f"{name}.weight"


def _mlp(part: str, inside: str, hidden: int, width: int) -> dict[str, tuple[str, Shape]]:
    return {
        f"{part}down": (f"{inside}.down_proj", (hidden, width)),
        f"{part}gate": (f"{inside}.gate_proj", (width, hidden)),
        f"{part}up": (f"{inside}.up_proj", (width, hidden)),
    }


def _grouped_query(attention: GroupedQuery, hidden: int) -> dict[str, tuple[str, Shape]]:
    width = attention.head_dim
    q, kv = attention.num_heads * width, attention.num_kv_heads * width
    found: dict[str, tuple[str, Shape]] = {
        "q": ("self_attn.q_proj", (q, hidden)),
        "k": ("self_attn.k_proj", (kv, hidden)),
        "v": ("self_attn.v_proj", (kv, hidden)),
        "o": ("self_attn.o_proj", (hidden, q)),
    }
    if attention.bias:
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            found[f"{part}_bias"] = (f"self_attn.{part}_proj.bias", (size,))
    if attention.norm != "none":
        head = attention.norm == "head"
        found["q_norm"] = ("self_attn.q_norm", (width if head else q,))
        found["k_norm"] = ("self_attn.k_norm", (width if head else kv,))
    return found


def _latent(attention: Latent, hidden: int) -> dict[str, tuple[str, Shape]]:
    heads, latent = attention.num_heads, attention.latent_dim
    q = heads * (attention.nope_dim + attention.rope_dim)
    found: dict[str, tuple[str, Shape]] = {}
    if attention.query_latent_dim is None:
        found["q"] = ("self_attn.q_proj", (q, hidden))
    else:
        found["q_down"] = ("self_attn.q_a_proj", (attention.query_latent_dim, hidden))
        found["q_norm"] = ("self_attn.q_a_layernorm", (attention.query_latent_dim,))
        found["q_up"] = ("self_attn.q_b_proj", (q, attention.query_latent_dim))
    return found | {
        "kv_down": ("self_attn.kv_a_proj_with_mqa", (latent + attention.rope_dim, hidden)),
        "kv_norm": ("self_attn.kv_a_layernorm", (latent,)),
        "kv_up": (
            "self_attn.kv_b_proj",
            (heads * (attention.nope_dim + attention.value_dim), latent),
        ),
        "o": ("self_attn.o_proj", (hidden, heads * attention.value_dim)),
    }
