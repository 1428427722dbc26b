"""A Qwen3-MoE checkpoint in the format of llama.cpp, weight for weight: token ids in and out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

_ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def write_gguf(folder: Path, path: Path) -> None:
    """`path` appears only once it is complete; one that is there is kept.

    Matrices stay bfloat16, norms and routers become float32, as llama.cpp wants them. There is no
    vocabulary in it, only its size. ValueError for another architecture.
    """
    if path.is_file():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3_moe":
        raise ValueError(f"{folder}: a model of type {config['model_type']}, not qwen3_moe")
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _write_sizes(writer, config)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        _write_tensors(writer, tensors, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _write_tensors(writer: Any, tensors: Any, config: dict[str, Any]) -> None:
    def matrix(name: str, values: torch.Tensor) -> None:
        raw = values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def small(name: str, values: torch.Tensor) -> None:
        writer.add_tensor(name, values.float().numpy())

    def get(name: str) -> torch.Tensor:
        found: torch.Tensor = tensors.get_tensor(f"{name}.weight")
        return found

    embedding = get("model.embed_tokens")
    matrix("token_embd.weight", embedding)
    matrix("output.weight", embedding if config.get("tie_word_embeddings") else get("lm_head"))
    small("output_norm.weight", get("model.norm"))
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}", f"blk.{layer}"
        for name, new in _NORMS.items():
            small(f"{ours}.{new}.weight", get(f"{theirs}.{name}"))
        for name, new in _ATTENTION.items():
            matrix(f"{ours}.{new}.weight", get(f"{theirs}.self_attn.{name}_proj"))
        small(f"{ours}.ffn_gate_inp.weight", get(f"{theirs}.mlp.gate"))
        for name in ("gate", "up", "down"):
            experts = [
                get(f"{theirs}.mlp.experts.{expert}.{name}_proj")
                for expert in range(config["num_experts"])
            ]
            matrix(f"{ours}.ffn_{name}_exps.weight", torch.stack(experts))
