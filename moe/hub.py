"""config.json as the hub spells it, for models that are written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""transformers' class for each architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSizes:
    """What every architecture's config.json says."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    dtype: str = "float32"


def hub_config(
    architecture: str, sizes: HubSizes, eos_token_ids: Sequence[int], **special: object
) -> dict[str, object]:
    """config.json; `special` are the fields only this architecture has."""
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "vocab_size": sizes.vocab_size,
        "rms_norm_eps": sizes.rms_eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": sizes.tie_embeddings,
        "attention_bias": False,
        "eos_token_id": list(eos_token_ids),
        "torch_dtype": sizes.dtype,
    } | special
