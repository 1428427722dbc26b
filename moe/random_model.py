"""Tiny models with random weights, in the format of real ones: for tests and first steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .chat import END_OF_TEXT, IM_END, IM_START, tokenizer_config
from .config import ARCHITECTURES, ModelConfig, read_config
from .hub import HubSizes, hub_config
from .tensor_names import TensorNames

_WEIGHT_STD = 0.15
_WEIGHT_STD_AT = 64
"""At this hidden size weights are wide enough that routing varies from token to token. Wider models
get narrower weights, by the square root, as a product's width grows with it."""
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""The first tokens of a written vocabulary; an id is a place in here."""
_FREQUENT_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModelSizes:
    """Sizes of a random model; the defaults are the preset called tiny."""

    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 64
    dense_size: int = 96
    """Width of layers without experts, and of shared experts that have a width of their own."""
    vocab_size: int = 320
    max_positions: int = 2048
    dtype: str = "float32"
    tie_embeddings: bool = False
    embedding_factor: int = 1
    """Embeddings so much wider than other weights. The wider they are, the more the experts of a
    token depend on the token, and not on what its whole text has in common."""


def write_random_model(
    folder: Path,
    architecture: str,
    seed: int,
    tensors: Callable[[ModelConfig, int], dict[str, torch.Tensor]] | None = None,
    /,
    **sizes: int | str,
) -> Path:
    """Write a checkpoint, its config and a byte-level tokenizer; the same bytes for the same seed.

    `sizes` are fields of `RandomModelSizes`; an architecture takes those it has. Weights have the
    hub's names and layout. `tensors` draws them, given config and seed: by default numpy, which
    takes its time for large models but draws the same everywhere. Raises ValueError for an
    architecture that is not in `ARCHITECTURES` or a vocabulary below 259 (256 bytes and three
    special tokens).
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is none of {', '.join(ARCHITECTURES)}")
    chosen = replace(RandomModelSizes(), **sizes)  # type: ignore[arg-type]
    tokenizer = byte_tokenizer(chosen.vocab_size)
    eos_token_ids = (SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT))
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": hub_config(
            architecture, _common(chosen), eos_token_ids, **_special(architecture, chosen)
        ),
        "generation_config.json": {"eos_token_id": list(eos_token_ids)},
        "tokenizer_config.json": tokenizer_config(max_positions=chosen.max_positions),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    drawn = (tensors or _random_tensors)(read_config(folder), seed)
    if chosen.embedding_factor != 1:
        drawn["model.embed_tokens.weight"] *= chosen.embedding_factor
    save_file(
        drawn,
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens; any text survives a round trip.

    The three special tokens come first, then the 256 bytes, then pairs of frequent letters, then
    reserved special tokens where pairs run out.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_more = vocab_size - len(SPECIAL_TOKENS) - len(letters)
    if num_more < 0:
        raise ValueError(
            f"vocab_size is {vocab_size}; {len(SPECIAL_TOKENS)} special tokens and 256 bytes need "
            f"{len(SPECIAL_TOKENS) + len(letters)}"
        )
    pairs = [(a, b) for a in _FREQUENT_LETTERS for b in _FREQUENT_LETTERS]
    merges = pairs[:num_more]
    reserved = [f"<|reserved_{i}|>" for i in range(num_more - len(merges))]
    tokens = [*SPECIAL_TOKENS, *letters, *("".join(pair) for pair in merges), *reserved]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in [*SPECIAL_TOKENS, *reserved]
        ]
    )
    return tokenizer


def _common(sizes: RandomModelSizes) -> HubSizes:
    return HubSizes(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        vocab_size=sizes.vocab_size,
        max_positions=sizes.max_positions,
        dtype=sizes.dtype,
        tie_embeddings=sizes.tie_embeddings,
    )


def _special(architecture: str, sizes: RandomModelSizes) -> dict[str, Any]:
    """Fields only this architecture has. Where layers may be dense, the first one is."""
    head: dict[str, Any] = {"head_dim": sizes.head_dim}
    dense = {"intermediate_size": sizes.dense_size}
    narrow: dict[str, Any] = {
        "intermediate_size": sizes.expert_size,
        "num_experts_per_tok": sizes.top_k,
    }
    routed: dict[str, Any] = {
        "num_experts_per_tok": sizes.top_k,
        "moe_intermediate_size": sizes.expert_size,
    }
    match architecture:
        case "mixtral":
            return head | narrow | {"num_local_experts": sizes.num_experts, "sliding_window": None}
        case "qwen3_moe":
            return (
                head
                | routed
                | {
                    "intermediate_size": sizes.expert_size,
                    "num_experts": sizes.num_experts,
                    "norm_topk_prob": True,
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [],
                    "use_sliding_window": False,
                }
            )
        case "qwen2_moe":
            return (
                head
                | routed
                | dense
                | {
                    "num_experts": sizes.num_experts,
                    "shared_expert_intermediate_size": sizes.dense_size,
                    "norm_topk_prob": False,
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [0],
                    "qkv_bias": True,
                    "use_sliding_window": False,
                }
            )
        case "granitemoe":
            multipliers = {
                "embedding_multiplier": 2.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            }
            return narrow | multipliers | {"num_local_experts": sizes.num_experts}
        case "olmoe":
            return narrow | {"num_experts": sizes.num_experts, "norm_topk_prob": False}
        case "deepseek_v2" | "deepseek_v3":
            return routed | dense | _deepseek(architecture, sizes)
        case "llama" | "qwen3":
            return head | dense
    raise AssertionError(architecture)


def _deepseek(architecture: str, sizes: RandomModelSizes) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "num_key_value_heads": sizes.num_heads,
        "n_routed_experts": sizes.num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": sizes.hidden_size // 2,
        "qk_nope_head_dim": sizes.head_dim // 2,
        "qk_rope_head_dim": sizes.head_dim // 2,
        "v_head_dim": sizes.head_dim // 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    }
    if architecture == "deepseek_v2":
        return shared | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}
    return shared | {"q_lora_rank": 3 * sizes.hidden_size // 4, "norm_topk_prob": True}


def _random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Normal weights; norms are near one. Each tensor's numbers come from (seed, its place)."""
    names = TensorNames.hub(config)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    std = _WEIGHT_STD * math.sqrt(_WEIGHT_STD_AT / config.hidden_size)
    tensors = {}
    for place, stored in enumerate(names.all()):
        noise = np.random.default_rng([seed, place]).standard_normal(stored.shape) * std
        values = noise + 1 if stored.name.endswith("norm.weight") else noise
        tensors[stored.name] = torch.from_numpy(values).to(dtype)
    return tensors
