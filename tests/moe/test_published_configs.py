"""Config files as they are published are understood."""

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.parts import GroupedQuery, Latent, Llama3Scaling, Yarn

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2_LITE = DEEPSEEK | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
DEEPSEEK_V3 = DEEPSEEK | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
LLAMA_3_2 = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder)


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V2_LITE)
    assert config.mixture is not None
    assert isinstance(config.attention, Latent)
    assert config.attention.query_latent_dim is None
    assert config.attention.interleaved
    assert config.moe_layers == tuple(range(1, 27))
    assert (config.mixture.shared_size, config.dense_size) == (2816, 10944)
    assert (config.mixture.router.num_groups, config.mixture.router.normalise) == (1, False)
    assert isinstance(config.rotary.scaling, Yarn)
    assert config.rotary.scaling.amplitude == 1.0


def test_deepseek_v3_and_that_its_own_files_are_quantised(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V3)
    assert config.mixture is not None
    router = config.mixture.router
    assert (router.score, router.num_groups, router.top_groups) == ("sigmoid", 8, 4)
    assert (router.group_score, router.bias, router.scale) == ("best two", True, 2.5)
    assert (config.num_moe_layers, config.num_prediction_layers) == (58, 1)
    assert config.attention.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ModelError, match="quantization_config is set; supported are float32"):
        read(tmp_path, DEEPSEEK_V3 | quantised)


def test_llama_3_2(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_3_2)
    assert isinstance(config.attention, GroupedQuery)
    assert (config.attention.num_kv_heads, config.mixture, config.moe_layers) == (8, None, ())
    assert isinstance(config.rotary.scaling, Llama3Scaling)
    assert config.tie_embeddings
