"""One whole sequence through a model on one rank that has all of it: what every other way of
computing it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import ModelConfig
from .context import PathContext
from .description import Description
from .kv_cache import BLOCK_SIZE, KVCache, attention_planes
from .model import ForwardOutput, Model
from .placement import Placement
from .program import run_alone
from .sampler import SampleRow, sample
from .sampling_params import SamplingParams
from .weights import Weights


def forward_alone(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> ForwardOutput:
    """Logits and experts of every position. `weights` are those of one rank with all experts."""
    num = len(token_ids)
    num_blocks = -(-num // BLOCK_SIZE)
    context = PathContext(
        path="alone",
        kv=KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            planes=attention_planes(config, 1),
            dtype=weights.dtype,
            device=weights.device,
        ),
        expert_placement=Placement.contiguous(config.num_experts, 1),
    )
    description = Description(
        input_ids=tuple(token_ids),
        positions=tuple(range(num)),
        cu_seqlens_q=(0, num),
        block_tables=(tuple(range(num_blocks)),),
        sample_rows=tuple(range(num)),
    )
    with torch.inference_mode():
        output: ForwardOutput = run_alone(Model(config).forward(weights, context, description))
        return output


def logprobs_alone(
    config: ModelConfig, weights: Weights, token_ids: Sequence[int], num_given: int
) -> list[float]:
    """`logprob_raw` of each token behind the first `num_given`, as a rank would have said it."""
    logits_TV = forward_alone(config, weights, token_ids).logits_SV
    rows = [
        SampleRow(
            params=SamplingParams(temperature=0.0, allowed_token_ids=(token_ids[at],)),
            seed=0,
            trajectory=0,
            position=at,
        )
        for at in range(num_given, len(token_ids))
    ]
    drawn = sample(logits_TV[num_given - 1 : len(token_ids) - 1], rows)
    return [item.logprob_raw for item in drawn]
