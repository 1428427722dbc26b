"""How much a forward pass computes up to each of its collectives, from the sizes of its model.

What is counted are products with weights and with cached keys and values, per row. Every rank comes
to the same numbers, so an order may depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from interlace.comm.path import Op

from .config import ModelConfig
from .parts import GroupedQuery

_CONTEXT = 512
"""Tokens attended to. With other lengths a few tickets would lie elsewhere."""
_OWN_TIME = 4
"""A collective takes time whatever leads to it: one in so many parts of an even share."""


def with_work(program: Sequence[Op], config: ModelConfig, tp_size: int) -> tuple[Op, ...]:
    """The same program; each `Op.work` is what it takes on a rank, at least 1."""
    work = dict.fromkeys((op.stage for op in program), 0)
    pending = 0

    def reach(*stages: str) -> None:
        nonlocal pending
        for stage in stages:
            if stage in work:
                work[stage] += pending
                pending = 0

    before, after = _attention(config)
    for layer in range(config.num_layers):
        reach(f"{layer}.rows")
        pending += before // tp_size
        reach(f"{layer}.heads")
        pending += after // tp_size
        if layer in config.moe_layers and config.mixture is not None:
            reach(f"{layer}.counts", f"{layer}.dispatch")
            width = config.hidden_size * 3
            pending += width * config.mixture.expert_size * config.top_k // tp_size
            reach(f"{layer}.combine")
            pending += width * config.mixture.shared_size // tp_size
        else:
            pending += 3 * config.hidden_size * config.dense_size // tp_size
    reach("final.rows")
    own_time = sum(work.values()) // max(1, len(work)) // _OWN_TIME + 1
    return tuple(replace(op, work=work[op.stage] + own_time) for op in program)


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Products of one row up to the heads' outputs, and of these with the output projection."""
    attention = config.attention
    heads = attention.num_heads * attention.value_dim
    if isinstance(attention, GroupedQuery):
        width = attention.head_dim
        projected = (attention.num_heads + 2 * attention.num_kv_heads) * width
        attended = attention.num_heads * 2 * width
    else:
        width = attention.latent_dim + attention.rope_dim
        projected = width + attention.num_heads * (attention.nope_dim + attention.rope_dim)
        attended = attention.num_heads * (width + attention.latent_dim)
    return config.hidden_size * projected + attended * _CONTEXT, config.hidden_size * heads
