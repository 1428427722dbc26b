"""How far a device's numbers are from exact ones."""

from __future__ import annotations

from pathlib import Path

import torch

from interlace.comm.collectives import Forward

from .config import read_config
from .context import PathContext
from .description import Description
from .kv_cache import BLOCK_SIZE, KVCache, attention_planes
from .model import ForwardOutput, Model
from .naive import naive_forward
from .placement import Placement
from .program import echo_result
from .weights import load_weights


def logit_error(folder: Path, dtype: torch.dtype, device: str | torch.device) -> float:
    """The largest error of a logit beside float64's, as a share of the largest logit.

    Of one sequence that fills a block, by one rank alone; for models small enough for float64.
    """
    config = read_config(folder)
    weights = load_weights(
        folder, config, expert_ids=range(config.num_experts), dtype=dtype, device=device
    )
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=1,
        planes=attention_planes(config),
        dtype=dtype,
        device=device,
    )
    context = PathContext(
        path="accuracy", kv=cache, expert_placement=Placement.contiguous(config.num_experts, 1)
    )
    token_ids = tuple((7919 * i + 1) % config.vocab_size for i in range(BLOCK_SIZE))
    rows = tuple(range(BLOCK_SIZE))
    described = Description(
        input_ids=token_ids,
        positions=rows,
        cu_seqlens_q=(0, BLOCK_SIZE),
        block_tables=((0,),),
        sample_rows=rows,
    )
    with torch.inference_mode():
        output = _alone(Model(config).forward(weights, context, described))
    wanted_TV = naive_forward(folder, token_ids).logits_TV
    error_TV = output.logits_SV.cpu().double() - wanted_TV
    return float(error_TV.abs().max() / wanted_TV.abs().max())


def _alone(forward: Forward) -> ForwardOutput:
    answer = None
    while True:
        try:
            answer = echo_result(forward.send(answer), 1, 0)
        except StopIteration as stop:
            output: ForwardOutput = stop.value
            return output
