"""The trainer: a transformers model, the loss of GRPO, an optimiser.

GRPO (arXiv 2402.03300): the advantage of a trajectory is its return beside those of its group, and
there is no value function. Shapes as in `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import pad
from transformers import MixtralForCausalLM

from .batch import Batch
from .routing import replayed

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers of the trainer."""

    learning_rate: float = 1e-3
    clip: float = 0.2
    entropy_weight: float = 0.02
    epochs: int = 2
    """Optimiser steps over one batch."""
    min_std: float = 0.25
    """Of returns, where they are divided by it: one failure among a hundred successes would weigh
    as much as all of them together."""
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """What a model makes of the tokens of a batch; column 0 is zero, nothing predicts it."""

    drawn_BT: torch.Tensor
    """Under the distribution over the allowed tokens."""
    raw_BT: torch.Tensor
    """Under the distribution over the vocabulary."""
    entropy_BT: torch.Tensor
    """Of the distribution over the allowed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Of the first epoch, whose weights are those that the batch came with."""

    loss: float
    entropy: float
    grad_norm: float


class Learner:
    """Owns a model in float32 and its optimiser. Draws no random numbers."""

    def __init__(self, folder: Path, recipe: Recipe, *, replay_routing: bool) -> None:
        """Starts from the weights in `folder`, those that the rollout starts from.

        `replay_routing`: choose the experts that the rollout chose. It needs batches whose tokens
        are all of one version, since a ledger keeps the choice made first.
        """
        self._model: Any = MixtralForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        self._model.train()
        self._recipe, self._replay_routing = recipe, replay_routing
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of all weights, by the names of transformers."""
        return {name: value.detach().clone() for name, value in self._model.state_dict().items()}

    def logprobs(self, batch: Batch, weights: Weights | None = None) -> Logprobs:
        """Of all tokens in one forward pass, under these weights; by default the learner's own."""
        replay = replayed(self._model, batch.experts_BTLK)
        with replay if self._replay_routing else nullcontext():
            inputs = {"input_ids": batch.token_ids_BT, "use_cache": False}
            if weights is None:
                logits_BTV = self._model(**inputs).logits[:, :-1]
            else:
                logits_BTV = functional_call(self._model, dict(weights), (), inputs).logits[:, :-1]
        allowed_BTV = batch.allowed_BTV[:, 1:]
        token_BT1 = batch.token_ids_BT[:, 1:, None]
        raw_BTV = logits_BTV.log_softmax(-1)
        drawn_BTV = logits_BTV.masked_fill(~allowed_BTV, float("-inf")).log_softmax(-1)
        finite_BTV = torch.where(allowed_BTV, drawn_BTV, 0.0)
        return Logprobs(
            drawn_BT=pad(drawn_BTV.gather(-1, token_BT1)[..., 0], (1, 0)),
            raw_BT=pad(raw_BTV.gather(-1, token_BT1)[..., 0], (1, 0)),
            entropy_BT=pad(-(drawn_BTV.exp() * finite_BTV).sum(-1), (1, 0)),
        )

    def learn(self, batch: Batch) -> Learnt:
        """All epochs over one batch."""
        advantage_B = advantages(batch.return_B, batch.group_B, self._recipe.min_std)
        learnt: list[Learnt] = []
        for _ in range(self._recipe.epochs):
            found = self.logprobs(batch)
            loss = grpo_loss(found, batch, advantage_B, self._recipe)
            self._optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                self._model.parameters(), self._recipe.max_grad_norm
            )
            self._optimizer.step()
            entropy = found.entropy_BT.detach()[batch.decided_BT].mean()
            learnt.append(Learnt(loss=loss.item(), entropy=entropy.item(), grad_norm=norm.item()))
        return learnt[0]


def advantages(return_B: torch.Tensor, group_B: torch.Tensor, min_std: float) -> torch.Tensor:
    """[B], return minus the group's mean, over its standard deviation or `min_std`."""
    advantage_B = torch.empty_like(return_B)
    for group in torch.unique(group_B).tolist():
        members = group_B == group
        returns = return_B[members]
        spread = returns.std(correction=0).clamp(min=min_std)
        advantage_B[members] = (returns - returns.mean()) / spread
    return advantage_B


def grpo_loss(
    found: Logprobs, batch: Batch, advantage_B: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Clipped surrogate minus weighted entropy, a mean over decided tokens.

    The ratio is against what the rollout recorded, so tokens of older weights count as such.
    """
    ratio_BT = (found.drawn_BT - batch.logprob_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - recipe.clip, 1 + recipe.clip)
    gain_BT = torch.minimum(ratio_BT * advantage_B[:, None], clipped_BT * advantage_B[:, None])
    wanted_BT = gain_BT + recipe.entropy_weight * found.entropy_BT
    return -wanted_BT[batch.decided_BT].mean()
