"""How rotary positions are described in a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config_fields import Fields
from .parts import Llama3Scaling, Rotary, Yarn


def read_rotary(fields: Fields) -> Rotary:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (the hub)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.part(key)
        if rope is None:
            continue
        theta = rope if rope.get("rope_theta") is not None else fields
        kind = _kind(rope)
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise rope.error("partial_rotary_factor", "is set; heads are rotated whole")
        if kind not in _SCALINGS:
            supported = ", ".join(_SCALINGS)
            raise fields.error(key, f"asks for {kind!r} rotary scaling; supported are {supported}")
        return Rotary(theta=theta.positive("rope_theta"), scaling=_SCALINGS[kind](rope))
    return Rotary(theta=fields.positive("rope_theta"))


def amplitude_of_scores(fields: Fields) -> float:
    """What latent attention multiplies queries and keys with, each, in longer contexts."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.part(key)
        if rope is not None and _kind(rope) != "default" and rope.get("mscale_all_dim"):
            return _yarn_amplitude(rope.positive("factor"), rope.positive("mscale_all_dim"))
    return 1.0


def _kind(rope: Fields) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _llama3(rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.positive("factor"),
        original_positions=rope.count("original_max_position_embeddings"),
        low_frequency=rope.positive("low_freq_factor"),
        high_frequency=rope.positive("high_freq_factor"),
    )


def _yarn(rope: Fields) -> Yarn:
    factor = rope.positive("factor")
    if rope.get("attention_factor") is not None:
        amplitude = rope.positive("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = rope.positive("mscale"), rope.positive("mscale_all_dim")
        amplitude = _yarn_amplitude(factor, over) / _yarn_amplitude(factor, under)
    else:
        amplitude = _yarn_amplitude(factor, 1.0)
    return Yarn(
        factor=factor,
        original_positions=rope.count("original_max_position_embeddings"),
        beta_fast=rope.positive("beta_fast", default=32.0),
        beta_slow=rope.positive("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
        amplitude=amplitude,
    )


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable[[Fields], Yarn | Llama3Scaling | None]] = {
    "default": lambda _: None,
    "yarn": _yarn,
    "llama3": _llama3,
}
