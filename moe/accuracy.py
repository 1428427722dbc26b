"""How far a device's numbers are from exact ones."""

from __future__ import annotations

from pathlib import Path

import torch

from .alone import forward_alone
from .config import read_config
from .kv_cache import BLOCK_SIZE
from .naive import naive_forward
from .weights import load_weights


def logit_error(folder: Path, dtype: torch.dtype, device: str | torch.device) -> float:
    """The largest error of a logit beside float64's, as a share of the largest logit.

    Of one sequence that fills a block, by one rank alone; for models small enough for float64.
    """
    config = read_config(folder)
    weights = load_weights(
        folder, config, expert_ids=range(config.num_experts), dtype=dtype, device=device
    )
    token_ids = tuple((7919 * i + 1) % config.vocab_size for i in range(BLOCK_SIZE))
    output = forward_alone(config, weights, token_ids)
    wanted_TV = naive_forward(folder, token_ids).logits_TV
    error_TV = output.logits_SV.cpu().double() - wanted_TV
    return float(error_TV.abs().max() / wanted_TV.abs().max())
