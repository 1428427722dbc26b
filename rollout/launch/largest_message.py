"""How many bytes one message of a path can have: what a slot of a window must hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.moe.config import ModelConfig
from interlace.moe.kv_cache import bytes_per_block
from interlace.rollout.batching import max_rows
from interlace.rollout.config import RolloutConfig
from interlace.rollout.outbox import MOST_BLOCKS, MOST_LETTER_BYTES

_BYTES = 4
"""Of the widest number that is computed with."""
_FEW_ROWS = 1 << 20
"""Counts, labels and paddings."""


def largest_message(config: RolloutConfig, model: ModelConfig, work: Sequence[str]) -> int:
    """An upper bound, the same on every rank; generous, since unused room costs no memory.

    The largest batch of this work, all of it for one rank's experts and coming from every rank;
    attention's heads are taken to be at most eight times as wide as the hidden state.
    """
    if config.launch.window_mib is not None:
        return config.launch.window_mib << 20
    if "transfer" in work:
        return _largest_transfer(config, model)
    scheduler = config.scheduler
    rows = max_rows(work, decoding=scheduler.max_running, chunk_tokens=scheduler.chunk_tokens)
    rows += config.layout.tp  # those that pad it
    moved = config.layout.world * model.hidden_size * max(8, 2 * model.top_k)
    told = 2 * model.vocab_size + 2 * model.num_moe_layers * model.top_k
    return rows * (moved + told) * _BYTES + _FEW_ROWS


def _largest_transfer(config: RolloutConfig, model: ModelConfig) -> int:
    """The blocks of one transfer, or its letters: what fits and one more, about a whole context."""
    blocks = MOST_BLOCKS * bytes_per_block(model, torch.float32, config.layout.tp)
    of_token = 8 + model.num_moe_layers * model.top_k
    letters = MOST_LETTER_BYTES + model.max_positions * of_token + _FEW_ROWS
    return max(blocks, letters)
