"""Rotary positions: tables of cosines and sines, and their application.

Shapes: P positions, E rotated width, T rows, A heads.
"""

from __future__ import annotations

import math

import torch

from .parts import Llama3Scaling, Rotary, Yarn


def frequencies(rotary: Rotary, width: int) -> torch.Tensor:
    """[E / 2] float64 angle per position of each pair."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain = rotary.theta**-exponent
    match rotary.scaling:
        case None:
            return plain
        case Yarn():
            return _yarn(plain, rotary.scaling, rotary.theta)
        case Llama3Scaling():
            return _llama3(plain, rotary.scaling)


def rotary_tables(
    rotary: Rotary, width: int, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [P, E], computed in float64 and rounded once to float32."""
    position = torch.arange(num_positions, dtype=torch.float64)
    angle = position[:, None] * frequencies(rotary, width)
    amplitude = rotary.scaling.amplitude if isinstance(rotary.scaling, Yarn) else 1.0
    cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
    return torch.cat((cos, cos), 1).float(), torch.cat((-sin, sin), 1).float()


def rotate(x_TAE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves paired: ``x cos + swap(x) sin``, sin negative in the first half.

    Products and sum are separate operations: fused ones round differently in a row's tail.
    """
    half = x_TAE.shape[-1] // 2
    return (x_TAE * cos_T1E).add_(torch.roll(x_TAE, half, dims=-1).mul_(sin_T1E))


def halves_paired(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Weight rows of heads of `width` that pair neighbours, reordered so that halves pair."""
    paired: torch.Tensor = rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)
    return paired


def _yarn(plain: torch.Tensor, yarn: Yarn, theta: float) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are divided, a ramp lies between."""
    width = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        turn = yarn.original_positions / (times * 2 * math.pi)
        return width * math.log(turn) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Pairs that turn less than `low_frequency` times in the original context are divided."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_frequency, scaling.high_frequency
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * (1 - smooth) + plain * smooth
