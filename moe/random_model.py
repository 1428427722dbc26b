"""Tiny models with random weights, in the format of real ones: for tests and first steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .chat import END_OF_TEXT, IM_END, IM_START, tokenizer_config
from .config import ARCHITECTURES, ModelConfig
from .hub import hub_config
from .tensor_names import TensorNames

WEIGHT_STD = 0.15
"""Wide enough that routing varies from token to token."""
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
    vocab_size: int = 320
    max_positions: int = 2048
    dtype: str = "float32"
    tie_embeddings: bool = False


def write_random_model(folder: Path, architecture: str, seed: int, **sizes: int | str) -> Path:
    """Write a checkpoint, its config and a byte-level tokenizer; the same bytes for the same seed.

    `sizes` are fields of `RandomModelSizes`. Weights are per expert, in the hub's names. Raises
    ValueError for an architecture that is not in `ARCHITECTURES` or a vocabulary below 259 (256
    bytes and three special tokens).
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is none of {', '.join(ARCHITECTURES)}")
    chosen = replace(RandomModelSizes(), **sizes)  # type: ignore[arg-type]
    tokenizer = byte_tokenizer(chosen.vocab_size)
    eos_token_ids = (SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT))
    config = _model_config(architecture, chosen, eos_token_ids)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        _random_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"}
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": hub_config(config),
        "generation_config.json": {"eos_token_id": list(config.eos_token_ids)},
        "tokenizer_config.json": tokenizer_config(max_positions=config.max_positions),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
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


def _model_config(
    architecture: str, sizes: RandomModelSizes, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        expert_size=sizes.expert_size,
        vocab_size=sizes.vocab_size,
        rms_eps=1e-6,
        rope_theta=10000.0,
        norm_topk=True,
        qk_norm=architecture == "qwen3_moe",
        max_positions=sizes.max_positions,
        tie_embeddings=sizes.tie_embeddings,
        eos_token_ids=eos_token_ids,
        dtype=sizes.dtype,
    )


def _random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Normal weights; norms are near one. Each tensor's numbers come from (seed, its place)."""
    names = TensorNames.hub(config)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    tensors = {}
    for place, (name, shape) in enumerate(names.shapes()):
        noise = np.random.default_rng([seed, place]).standard_normal(shape) * WEIGHT_STD
        values = noise + 1 if name.endswith("norm.weight") else noise
        tensors[name] = torch.from_numpy(values).to(dtype)
    return tensors
