"""How far a trainer's log-probabilities are from those that the rollout recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from interlace.rollout import Trajectory
from interlace.rollout.mismatch import mismatch_by_lag

from .batch import Batch
from .learner import Learner, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Absolute differences over some sampled tokens, nats.

    Each is the larger one of two: under the vocabulary, and under what was allowed.
    """

    tokens: int
    mean: float
    p99: float
    largest: float


def gap_by_lag(
    learner: Learner,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    weights_of: Mapping[int, Weights],
) -> dict[int, Gap]:
    """Lag -> gap, in ascending order of lag; `batch` is made of `trajectories`.

    The lag of a token is the version that sampled it minus the oldest one whose keys and values it
    attended to. It is compared with a forward of its own version, all of it computed anew, so
    without lag what is left is rounding. KeyError if `weights_of` lacks a version of the batch.
    """
    raw_BT, drawn_BT = torch.zeros(2, *batch.token_ids_BT.shape)
    for version in batch.versions:
        with torch.no_grad():
            found = learner.logprobs(batch, weights_of[version])
        mine_BT = batch.version_BT == version
        raw_BT = torch.where(mine_BT, found.raw_BT, raw_BT)
        drawn_BT = torch.where(mine_BT, found.drawn_BT, drawn_BT)
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    raw_each, drawn_each = (
        [row[:length] for row, length in zip(column_BT, lengths, strict=True)]
        for column_BT in (raw_BT, drawn_BT)
    )
    under_all = mismatch_by_lag(trajectories, raw_each, column="logprob_raw")
    under_allowed = mismatch_by_lag(trajectories, drawn_each, column="logprob")
    gaps = {}
    for one, other in zip(under_all, under_allowed, strict=True):
        assert one.lag is not None
        gaps[one.lag] = Gap(
            tokens=one.count,
            mean=max(one.mean, other.mean),
            p99=max(one.quantiles[0.99], other.quantiles[0.99]),
            largest=max(one.max, other.max),
        )
    return gaps
