"""Random models of every architecture, built by transformers."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 160
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
    "eos_token_id": 2,
    "pad_token_id": None,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

THEIR_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_experts": 8,
        "norm_topk_prob": True,
        **ROUTED,
    },
    "qwen3_moe, dense at times, weights as they are": {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "intermediate_size": 96,
        "num_experts": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        **ROUTED,
    },
    "qwen2_moe": {
        "intermediate_size": 96,
        "num_experts": 8,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [0],
        **ROUTED,
    },
    "qwen2_moe, normalised, no bias": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": True,
        "qkv_bias": False,
        **ROUTED,
    },
    "granitemoe": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "olmoe": {
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "deepseek_v2": {
        **ROUTED,
        **LATENT,
        "num_hidden_layers": 3,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v2, greedy, yarn": {
        **ROUTED,
        **LATENT,
        "q_lora_rank": 40,
        "topk_method": "greedy",
        "rope_parameters": YARN,
    },
    "deepseek_v3": {**ROUTED, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 40},
    "deepseek_v3, halves paired, yarn": {
        **ROUTED,
        **LATENT,
        "q_lora_rank": None,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "rope_parameters": YARN,
    },
    "llama": {"intermediate_size": 96, "rope_parameters": LLAMA3},
    "qwen3": {"intermediate_size": 96, "head_dim": 32},
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A model whose random weights make every part count, biases and norms too."""
    torch.manual_seed(5)
    options = {"num_hidden_layers": 2} | COMMON | THEIR_MODELS[name] | changes
    config = AutoConfig.for_model(name.partition(",")[0], **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in tensor_name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif "bias" in tensor_name:
                tensor.copy_(torch.randn_like(tensor) * 0.1)
    return model
