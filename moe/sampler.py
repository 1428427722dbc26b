"""Choosing the next token: the same token for the same logits, seed, trajectory and position.

Every row is computed alone, by the same operations whatever else is in the batch. Noise is
counter-based (Philox, Salmon et al. 2011): nothing is drawn in order, so nothing depends on one.
Rows without masks and filters are drawn together where there is an extension, to the same bits.

Shapes: S rows, V vocabulary, C candidate tokens in ascending order of id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .draw import Noise, draw
from .sampling_params import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
_ROUNDING = 1e-9
"""Far more than rounding does to what `gumbel_argmax` compares."""


class SampleRow(NamedTuple):
    """One row to sample: how, and what its noise is a function of."""

    params: SamplingParams
    seed: int
    trajectory: int
    position: int
    """Absolute position the sampled token will have."""
    generated: tuple[int, ...] = ()
    """Tokens of this turn so far; only `choices` look at them."""


class Sampled(NamedTuple):
    """A token and its log-probabilities; both are float32 values."""

    token: int
    logprob_raw: float
    """Under the model: log-softmax of the logits."""
    logprob: float
    """Under the distribution it was drawn from; for greedy, at temperature 1 after masks."""
    done_choice: bool
    """The turn now spells one of its choices, and no other choice goes on from there."""


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for parameters no token could satisfy, or outside their ranges."""
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature is {params.temperature}; it must be 0 or a positive number")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p is {params.top_p}; it must be above 0 and at most 1")
    if params.top_k < 0:
        raise ValueError(f"top_k is {params.top_k}; it must be 0 (all) or positive")
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens is {params.max_tokens}; at least one token must be allowed")
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "choices": tuple(token for choice in params.choices for token in choice),
    }
    for field, ids in named.items():
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{field} has token id {outside[0]}, but the vocabulary has {vocab_size} tokens"
            )
    _validate_choices(params)


def _validate_choices(params: SamplingParams) -> None:
    if params.choices and params.allowed_token_ids:
        raise ValueError("choices and allowed_token_ids exclude each other: set one of them")
    if () in params.choices:
        raise ValueError("choices has an empty choice; a turn has at least one token")
    for choice in params.choices:
        longer = [c for c in params.choices if len(c) > len(choice) and _starts(c, choice)]
        if longer and not params.stop_token_ids:
            raise ValueError(
                f"choice {choice} is the beginning of choice {longer[0]}: to end there the turn "
                f"needs stop_token_ids"
            )


def sample(logits_SV: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token for each row of float32 logits, in order.

    Gumbel-argmax: the largest of log-probability plus noise (seed, trajectory, position, token id);
    temperature 0 takes the most likely token; ties go to the lowest id. Raises ValueError when a
    row's choices leave no token (see `validate` for everything that can be known before).
    """
    if len(rows) != len(logits_SV):
        raise ValueError(f"{len(logits_SV)} rows of logits, {len(rows)} rows to sample")
    if not logits_SV.is_cpu:
        logits_SV = logits_SV.cpu()
    size = logits_SV.shape[1]
    plain = [at for at, row in enumerate(rows) if _is_plain(row.params, size)]
    chosen = rows if len(plain) == len(rows) else [rows[at] for at in plain]
    drawn = draw(
        logits_SV if len(plain) == len(rows) else logits_SV[plain],
        [row.params.temperature for row in chosen],
        [Noise(row.seed, row.trajectory, row.position) for row in chosen],
    )
    sampled = {
        at: Sampled(one.token, one.logprob_raw, one.logprob, False)
        for at, one in zip(plain, drawn, strict=True)
        if one is not None
    }
    return [
        sampled.get(at) or sample_row(logits_SV[at].numpy(), row) for at, row in enumerate(rows)
    ]


def uniform_noise(*, seed: int, trajectory: int, position: int, vocab_size: int) -> Floats:
    """[V] between 0 and 1, both excluded: a function of its arguments and nothing else.

    The position has a word of the counter to itself: the first counts a position's blocks of four
    tokens, and what two positions have in common would be tokens drawn alike.
    """
    mask = (1 << 64) - 1
    key = np.array([seed & mask, trajectory & mask], dtype=np.uint64)  # else large ones are rounded
    bits = np.random.Philox(key=key, counter=np.array([0, position, 0, 0], dtype=np.uint64))
    uniform_V = np.random.Generator(bits).random(vocab_size)
    uniform_V += 2.0**-54  # never zero; one would need 1 - 2^-54, which is not representable
    return uniform_V


def gumbel(uniform: Floats) -> Floats:
    """Standard Gumbel noise from uniform noise."""
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def gumbel_argmax(log_C: Floats, uniform_C: Floats) -> int:
    """Index of the largest of ``log_C + gumbel(uniform_C)``, the lowest of several.

    As -log u > 1 - u, no candidate gets beyond p / (1 - u). Noise is computed only for the few
    that could get as far as the one with the best prospect does.
    """
    prospect_C = np.exp(log_C) / (1 - uniform_C)
    best = int(np.argmax(prospect_C))
    reached = np.exp(log_C[best]) / -np.log(uniform_C[best])
    few = np.flatnonzero(prospect_C >= reached * (1 - _ROUNDING))
    return int(few[np.argmax(log_C[few] + gumbel(uniform_C[few]))])


def allowed_next(params: SamplingParams, generated: tuple[int, ...]) -> tuple[int, ...]:
    """Ascending ids that may follow `generated`; empty: any token of the vocabulary."""
    if not params.choices:
        return tuple(sorted(set(params.allowed_token_ids)))
    length = len(generated)
    open_choices = [c for c in params.choices if len(c) > length and _starts(c, generated)]
    allowed = {choice[length] for choice in open_choices}
    if not allowed:
        raise ValueError(f"no choice goes on after the tokens {generated}: the turn is over")
    if generated in params.choices:
        allowed.update(params.stop_token_ids)
    return tuple(sorted(allowed))


def _starts(choice: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return choice[: len(beginning)] == beginning


def _is_plain(params: SamplingParams, vocab_size: int) -> bool:
    """The token comes from the whole vocabulary."""
    if params.choices or params.allowed_token_ids:
        return False
    has_filter = 0 < params.top_k < vocab_size or params.top_p < 1
    return params.temperature == 0 or not has_filter


def sample_row(logits_V: NDArray[np.float32], row: SampleRow) -> Sampled:
    """What `sample` returns for one row: the reference, and the only way for masks and filters."""
    params = row.params
    raw_V = _log_softmax(logits_V.astype(np.float64))
    allowed = allowed_next(params, row.generated)
    ids_C = np.array(allowed, dtype=np.int64) if allowed else None
    log_C = raw_V if ids_C is None else _log_softmax(raw_V[ids_C])
    if params.temperature == 0:
        index = int(np.argmax(log_C))
    else:
        kept_C, log_C = _filter(log_C, params)
        uniform_V = uniform_noise(
            seed=row.seed,
            trajectory=row.trajectory,
            position=row.position,
            vocab_size=len(logits_V),
        )
        if kept_C is not None:
            ids_C = kept_C if ids_C is None else ids_C[kept_C]
        index = gumbel_argmax(log_C, uniform_V if ids_C is None else uniform_V[ids_C])
    token = index if ids_C is None else int(ids_C[index])
    turn = (*row.generated, token)
    return Sampled(
        token=token,
        logprob_raw=float(np.float32(raw_V[token])),
        logprob=float(np.float32(log_C[index])),
        done_choice=turn in params.choices
        and not any(len(c) > len(turn) and _starts(c, turn) for c in params.choices),
    )


def _filter(log_C: Floats, params: SamplingParams) -> tuple[Ids | None, Floats]:
    """Temperature, then top-k, then top-p: which candidates stay (None: all) and their log p."""
    if params.temperature != 1:
        log_C = _log_softmax(log_C / params.temperature)
    kept: Ids | None = None
    if 0 < params.top_k < len(log_C):
        kept = _largest(log_C, params.top_k)
        log_C = _log_softmax(log_C[kept])
    if params.top_p < 1:
        nucleus = _nucleus(log_C, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        log_C = _log_softmax(log_C[nucleus])
    return kept, log_C


def _largest(log_C: Floats, count: int) -> Ids:
    """Ascending indices of the `count` largest; among equals the lowest index stays."""
    threshold = np.partition(log_C, len(log_C) - count)[len(log_C) - count]
    above = np.flatnonzero(log_C > threshold)
    equal = np.flatnonzero(log_C == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(log_C: Floats, top_p: float) -> Ids:
    """Ascending indices of the fewest most likely candidates whose mass reaches `top_p`."""
    likely = np.arange(len(log_C))
    floor = np.log((1 - top_p) / len(log_C))  # all below it together have less than 1 - top_p
    likely = likely[log_C >= floor]
    order = likely[np.argsort(-log_C[likely], kind="stable")]
    mass = np.cumsum(np.exp(log_C[order]))
    count = int(np.searchsorted(mass, top_p)) + 1
    return np.sort(order[:count])


def _log_softmax(values: Floats) -> Floats:
    shifted = values - values.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result
