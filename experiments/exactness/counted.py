"""What a step cannot do without: FLOPs, and for one row the bytes of the weights it meets."""

from __future__ import annotations

from interlace.moe.config import ModelConfig
from interlace.moe.parts import GroupedQuery

from .shape import Shape

BYTES = 2
"""Of a number in bfloat16."""


def flops(config: ModelConfig, shape: Shape) -> float:
    """Of all products and of attention over what is visible."""
    sizes = _attention(config)
    seen = shape.sequences * sum(range(shape.start + 1, shape.end + 1))
    attended = 4.0 * config.num_layers * seen * sizes.num_heads * sizes.head_dim
    per_row = config.num_layers * _numbers_of_layer(config)
    head = shape.sequences * config.vocab_size * config.hidden_size
    return 2.0 * (shape.num_rows * per_row + head) + attended


def bytes_of_one_row(config: ModelConfig, shape: Shape) -> float | None:
    """Weights, keys and values that one row meets; None for more rows, whose experts overlap."""
    if shape.num_rows != 1:
        return None
    sizes = _attention(config)
    cached = 2 * sizes.num_kv_heads * sizes.head_dim * shape.end
    head = config.vocab_size * config.hidden_size
    return float(BYTES * (config.num_layers * (_numbers_of_layer(config) + cached) + head))


def _numbers_of_layer(config: ModelConfig) -> int:
    """Of the weights that one row is multiplied with."""
    sizes, mixture = _attention(config), config.mixture
    assert mixture is not None
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads  # q, k, v and o
    own = 3 * mixture.router.top_k * mixture.expert_size
    return config.hidden_size * (heads * sizes.head_dim + mixture.num_experts + own)


def _attention(config: ModelConfig) -> GroupedQuery:
    assert isinstance(config.attention, GroupedQuery)
    return config.attention
