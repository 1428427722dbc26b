"""Tokens of many rows in one call of the extension, to the bits of `sampler.sample_row`.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import kernels


class Noise(NamedTuple):
    """What a row's noise is a function of: 64 bits of each count."""

    seed: int
    trajectory: int
    position: int


class Drawn(NamedTuple):
    """A token and the values of two float32 log-probabilities: under the model, and at the row's
    temperature (at temperature 1 for greedy)."""

    token: int
    logprob_raw: float
    logprob: float


def draw(
    logits_SV: torch.Tensor, temperatures: Sequence[float], noises: Sequence[Noise]
) -> list[Drawn | None]:
    """A token for each row of float32 on a CPU, from the whole vocabulary; temperature 0 takes the
    most likely.

    None, without an extension for all rows, and otherwise for those where the last bit of a float64
    could make a difference to what is returned: a draw that is nearly a tie, a value in the middle
    between two of float32, more than 64 tokens of nearly the same rank, or what is not a number.
    """
    num_rows, size = logits_SV.shape
    if kernels.native is None or not num_rows:
        return [None] * num_rows
    logits_SV = logits_SV.contiguous()
    drawn = kernels.native.draw(logits_SV.data_ptr(), size, temperatures, noises)
    return [None if one is None else Drawn._make(one) for one in drawn]
