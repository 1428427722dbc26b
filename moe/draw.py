"""Tokens of many rows in one call of the extension, to the bits of `sampler.sample_row`.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import kernels

_WORD = (1 << 64) - 1


class Noise(NamedTuple):
    """What a row's noise is a function of."""

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
    logits_SV: NDArray[np.float32], temperatures: Sequence[float], noises: Sequence[Noise]
) -> list[Drawn | None]:
    """A token for each row, from the whole vocabulary; temperature 0 takes the most likely.

    None, without an extension for all rows, and otherwise for those where the last bit of a float64
    could make a difference to what is returned: a draw that is nearly a tie, a value in the middle
    between two of float32, more than 64 tokens of nearly the same rank, or what is not a number.
    """
    num_rows, size = logits_SV.shape
    if kernels.native is None or not num_rows:
        return [None] * num_rows
    logits_SV = np.ascontiguousarray(logits_SV)
    noise_S3 = np.array(
        [(seed & _WORD, trajectory & _WORD, position) for seed, trajectory, position in noises],
        dtype=np.uint64,
    )
    temperature_S = np.array(temperatures, dtype=np.float64)
    weights_V, out_S3 = np.empty(size), np.empty((num_rows, 3))
    kernels.native.draw(
        out_S3.ctypes.data,
        logits_SV.ctypes.data,
        temperature_S.ctypes.data,
        noise_S3.ctypes.data,
        num_rows,
        size,
        weights_V.ctypes.data,
    )
    return [
        Drawn(int(token), logprob_raw, logprob) if token >= 0 else None
        for token, logprob_raw, logprob in out_S3.tolist()
    ]
