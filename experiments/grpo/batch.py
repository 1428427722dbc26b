"""Trajectories side by side, as a trainer reads them.

Shapes: B trajectories, T tokens of the longest, V vocabulary, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.moe.sampler import allowed_next
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout import Trajectory

Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded on the right with token 0, which nothing before it attends to."""

    token_ids_BT: torch.Tensor
    sampled_BT: torch.Tensor
    """Whether the model said the token."""
    decided_BT: torch.Tensor
    """Whether it could have said another one: only these are learnt from."""
    allowed_BTV: torch.Tensor
    """The tokens from which this one was drawn; all of them where it was given."""
    logprob_BT: torch.Tensor
    """Under the distribution it was drawn from; 0 where it was given."""
    logprob_raw_BT: torch.Tensor
    """Under all of the vocabulary; 0 where it was given."""
    version_BT: torch.Tensor
    """Of the weights that sampled it; -1 where it was given."""
    kv_version_BT: torch.Tensor
    """Oldest version among the keys and values that it was sampled from."""
    experts_BTLK: torch.Tensor
    """As chosen in the rollout; -1 where nothing is known."""
    return_B: torch.Tensor
    group_B: torch.Tensor
    """Trajectories whose returns are compared have the same number."""

    @property
    def versions(self) -> list[int]:
        """All that have sampled something, in ascending order."""
        return list(self.tokens_of_version)

    @property
    def tokens_of_version(self) -> dict[int, int]:
        """Version -> tokens it has sampled, in ascending order."""
        sampled = self.version_BT[self.sampled_BT]
        versions, counts = torch.unique(sampled, return_counts=True)
        return dict(zip(versions.tolist(), counts.tolist(), strict=True))


def batch_of(trajectories: Sequence[Trajectory], choices: Choices, vocab_size: int) -> Batch:
    """All of them, in the order given, with every turn drawn from `choices`.

    ValueError if there is none, or a turn says something that is no choice.
    """
    if not trajectories:
        raise ValueError("a batch needs at least one trajectory")
    longest = max(trajectory.num_tokens for trajectory in trajectories)
    allowed_BTV = torch.ones(len(trajectories), longest, vocab_size, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.spans:
            _mark_allowed(allowed_BTV[row], trajectory.token_ids[span].tolist(), span, choices)
    sampled_BT = _column(trajectories, "loss_mask", longest, False)
    groups = {group: n for n, group in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    return Batch(
        token_ids_BT=_column(trajectories, "token_ids", longest, 0).long(),
        sampled_BT=sampled_BT,
        decided_BT=sampled_BT & (allowed_BTV.sum(-1) > 1),
        allowed_BTV=allowed_BTV,
        logprob_BT=_column(trajectories, "logprob", longest, 0.0).nan_to_num(nan=0.0),
        logprob_raw_BT=_column(trajectories, "logprob_raw", longest, 0.0).nan_to_num(nan=0.0),
        version_BT=_column(trajectories, "version", longest, -1),
        kv_version_BT=_column(trajectories, "kv_version", longest, -1),
        experts_BTLK=_experts(trajectories, longest),
        return_B=torch.tensor([t.return_ for t in trajectories], dtype=torch.float32),
        group_B=torch.tensor([groups[t.group_id] for t in trajectories]),
    )


def _mark_allowed(
    allowed_TV: torch.Tensor, said: Sequence[int], span: slice, choices: Choices
) -> None:
    params = SamplingParams(choices=choices)
    for place, token in enumerate(said):
        allowed = allowed_next(params, tuple(said[:place]))
        if token not in allowed:
            raise ValueError(
                f"token {token} at position {span.start + place} goes on with none of {choices}: "
                "the batch is made with other choices than the rollout"
            )
        allowed_TV[span.start + place] = False
        allowed_TV[span.start + place, list(allowed)] = True


def _column(
    trajectories: Sequence[Trajectory], name: str, longest: int, padding: Any
) -> torch.Tensor:
    columns: list[NDArray[Any]] = [getattr(trajectory, name) for trajectory in trajectories]
    padded = np.full((len(columns), longest), padding, columns[0].dtype)
    for row, column in enumerate(columns):
        padded[row, : len(column)] = column
    return torch.from_numpy(padded)


def _experts(trajectories: Sequence[Trajectory], longest: int) -> torch.Tensor:
    shape = trajectories[0].experts.shape[1:]
    padded = np.full((len(trajectories), longest, *shape), -1, np.int64)
    for row, trajectory in enumerate(trajectories):
        known = trajectory.experts_known
        padded[row, :known] = trajectory.experts[:known]
    return torch.from_numpy(padded)
