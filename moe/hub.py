"""A model's description as the hub's config.json: the inverse of `read_config`."""

from __future__ import annotations

from .config import ModelConfig


def hub_config(config: ModelConfig) -> dict[str, object]:
    """config.json for `config`, in the hub's spelling."""
    qwen = config.architecture == "qwen3_moe"
    common: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if qwen else "MixtralForCausalLM"],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_experts_per_tok": config.top_k,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "sliding_window": None,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": config.dtype,
    }
    if not qwen:
        special = {"num_local_experts": config.num_experts, "intermediate_size": config.expert_size}
        return common | special
    return common | {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_size,
        "intermediate_size": config.expert_size,
        "norm_topk_prob": config.norm_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }
