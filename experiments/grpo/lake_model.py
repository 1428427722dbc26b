"""A tiny Mixtral from scratch whose whole vocabulary is what is said on the frozen lake."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM

UNKNOWN, END = "<unk>", "<end>"
ACTIONS = {
    "left": ("le", "ft"),
    "down": ("do", "wn"),
    "right": ("ri", "ght"),
    "up": ("u", "p"),
}
"""Each in two tokens, so that a turn is decoded and not only prefilled; the first one decides."""
MAP_ROWS = ("SFFF", "FHFH", "FFFH", "HFFG")
VOCABULARY = (
    *(UNKNOWN, END, "\n"),
    "Cross the frozen lake from S to G. F is ice, H is a hole.",
    *MAP_ROWS,
    "Reply with left, down, right or up.",
    *(f"You are at row {row}" for row in range(4)),
    *(f", column {column}." for column in range(4)),
    *(piece for pieces in ACTIONS.values() for piece in pieces),
)
"""An id is a place in here: an observation takes two tokens, its row and its column."""
VOCAB_SIZE = 32
MAX_POSITIONS = 256


def action_choices() -> tuple[tuple[int, ...], ...]:
    """The four actions as token ids, in the order of `ACTIONS`."""
    place = {token: number for number, token in enumerate(VOCABULARY)}
    return tuple(tuple(place[piece] for piece in pieces) for pieces in ACTIONS.values())


def write_lake_model(folder: Path, seed: int) -> Path:
    """Write config, weights and tokenizer in Hugging Face format; the same bytes for the same seed.

    226,112 float32 parameters: 2 layers, width 64, 4 experts of which 2 are chosen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_POSITIONS,
        sliding_window=None,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MixtralForCausalLM(config).save_pretrained(folder)
    lake_tokenizer().save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    return folder


def lake_tokenizer() -> Tokenizer:
    """One token for each entry of `VOCABULARY`; text that is none of them becomes `<unk>`."""
    tokenizer = Tokenizer(
        models.WordLevel({token: n for n, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    )
    longest_first = sorted(VOCABULARY[2:], key=len, reverse=True)
    escaped = ["".join(f"\\{c}" if c in "." else c for c in text) for text in longest_first]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(escaped)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (UNKNOWN, END)]
    )
    return tokenizer
