"""How far the trainer's log-probabilities are from those the tokens were sampled with.

Notation: q is the rollout's distribution, which tokens were drawn from; p is the trainer's. For
each sampled token d = log p - log q is the trainer's log-probability minus the ledger's, and
r = exp(d) its importance weight. The estimators are those of John Schulman's note "Approximating
KL Divergence" (2020, joschu.net/blog/kl-approx.html), of KL(q || p) in nats a token:

    k1 = mean(-d)                unbiased; may be negative
    k3 = mean(exp(d) - 1 - d)    unbiased where q > 0 wherever p is; never negative

and the effective sample size is Kish's, as a share of the tokens: sum(r)^2 / (n * sum(r^2)), which
is 1 where all weights are equal.

Shapes: T tokens of a trajectory, S of them sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .trajectory import Trajectory

Floats = NDArray[np.float64]
Column = Literal["logprob_raw", "logprob"]
"""Which of the ledger's log-probabilities: under the model's logits, or under the distribution the
token was drawn from, for trainers that apply the same masks and temperature."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMismatch:
    """The gap over the sampled tokens of one kind."""

    version: int | None
    """Version of the weights that sampled them; None: of all."""
    lag: int | None
    """Versions between those weights and the oldest keys and values attended to; None: any."""
    count: int
    """Sampled tokens."""
    mean: float
    """Of |d|, nats."""
    max: float
    quantiles: Mapping[float, float]
    """Of |d|, at `QUANTILES`, linear between ranks."""
    k1: float
    k3: float
    ess: float
    """Effective sample size over `count`."""


def mismatch(
    trajectories: Sequence[Trajectory],
    logprobs_of_trainer: Sequence[Any],
    *,
    column: Column = "logprob_raw",
) -> list[VersionMismatch]:
    """The gap per version of the weights, oldest first.

    `logprobs_of_trainer` has an array (or tensor) for each trajectory: [T], of which only the
    sampled positions are read, or [S]. ValueError if their number or a length does not fit, or a
    value is NaN.
    """
    gaps = _gaps(trajectories, logprobs_of_trainer, column)
    versions = _sampled(trajectories, lambda trajectory: trajectory.version)
    return [
        _measured(gaps[versions == version], version=version, lag=None)
        for version in np.unique(versions).tolist()
    ]


def mismatch_by_lag(
    trajectories: Sequence[Trajectory],
    logprobs_of_trainer: Sequence[Any],
    *,
    column: Column = "logprob_raw",
) -> list[VersionMismatch]:
    """The gap per age of the keys and values attended to, smallest first; as `mismatch`.

    With lag 0 a token was computed by one version alone, as a trainer's forward is.
    """
    gaps = _gaps(trajectories, logprobs_of_trainer, column)
    lags = _sampled(trajectories, lambda trajectory: trajectory.version - trajectory.kv_version)
    return [_measured(gaps[lags == lag], version=None, lag=lag) for lag in np.unique(lags).tolist()]


def mismatch_of_transformers(
    model: Any,
    trajectories: Sequence[Trajectory],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[VersionMismatch]:
    """`mismatch` with a forward of a transformers model over every trajectory, one at a time.

    Compares log-probabilities under the model's logits. `on_progress` hears trajectories done and
    in all.
    """
    each = []
    for done, trajectory in enumerate(trajectories, start=1):
        each.append(logprobs_of_transformers(model, trajectory))
        on_progress(done, len(trajectories))
    return mismatch(trajectories, each)


def logprobs_of_transformers(model: Any, trajectory: Trajectory) -> Floats:
    """float64 [T]: log-probability of every token but the first (NaN) given those before it.

    Logits are the model's, in evaluation mode and without gradients; softmax in float64.
    """
    tokens_T = torch.from_numpy(trajectory.token_ids.astype(np.int64)).to(model.device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
            log_TV = torch.log_softmax(logits_TV[:-1].double(), dim=-1)
            log_T = log_TV.gather(1, tokens_T[1:, None])[:, 0]
    finally:
        model.train(training)
    return np.concatenate(([np.nan], log_T.cpu().numpy()))


def _gaps(
    trajectories: Sequence[Trajectory], logprobs_of_trainer: Sequence[Any], column: Column
) -> Floats:
    """d of all sampled tokens, one trajectory after the other."""
    if len(trajectories) != len(logprobs_of_trainer):
        raise ValueError(
            f"{len(trajectories)} trajectories, and log-probabilities of {len(logprobs_of_trainer)}"
        )
    gaps = [
        _at_sampled(trajectory, theirs) - getattr(trajectory, column)[trajectory.loss_mask]
        for trajectory, theirs in zip(trajectories, logprobs_of_trainer, strict=True)
    ]
    return np.concatenate([np.zeros(0), *gaps])


def _at_sampled(trajectory: Trajectory, logprobs: Any) -> Floats:
    if isinstance(logprobs, torch.Tensor):
        logprobs = logprobs.detach().double().cpu().numpy()
    values = np.asarray(logprobs, np.float64)
    mask, number = trajectory.loss_mask, trajectory.trajectory_id
    if values.shape == (trajectory.num_tokens,):
        values = values[mask]
    elif values.shape != (trajectory.sampled_tokens,):
        raise ValueError(
            f"trajectory {number} has {trajectory.num_tokens} tokens, {trajectory.sampled_tokens} "
            f"of them sampled, and log-probabilities of shape {list(values.shape)}"
        )
    wrong = np.isnan(values)
    if wrong.any():
        position = int(np.flatnonzero(mask)[int(wrong.argmax())])
        raise ValueError(f"trajectory {number}: the log-probability of token {position} is NaN")
    return values


def _sampled(
    trajectories: Sequence[Trajectory], of: Callable[[Trajectory], NDArray[np.int32]]
) -> NDArray[np.int32]:
    each = [of(trajectory)[trajectory.loss_mask] for trajectory in trajectories]
    return np.concatenate([np.zeros(0, np.int32), *each])


def _measured(gaps: Floats, *, version: int | None, lag: int | None) -> VersionMismatch:
    distance = np.abs(gaps)
    weights = np.exp(gaps - gaps.max())  # a common factor, which the share does not see
    return VersionMismatch(
        version=version,
        lag=lag,
        count=len(gaps),
        mean=float(distance.mean()),
        max=float(distance.max()),
        quantiles={
            share: float(value)
            for share, value in zip(QUANTILES, np.quantile(distance, QUANTILES), strict=True)
        },
        k1=float(-gaps.mean()),
        k3=float((np.expm1(gaps) - gaps).mean()),
        ess=float(weights.sum() ** 2 / (len(gaps) * (weights**2).sum())),
    )
