"""The accuracy reference: one sequence, float64 throughout, nothing clever, nothing shared.

Shapes: T positions, D hidden, H query heads, G key/value heads, E head width, X experts,
I expert width, K top-k, L layers with experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .config import ModelConfig, read_config
from .naive_attention import NaiveAttention
from .parts import Router
from .tensor_names import Layer, Stored, TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveOutput:
    """Exact but for float64 rounding."""

    logits_TV: torch.Tensor
    margin_T: torch.Tensor
    """Over all layers, the smallest gap between what was chosen (the last expert, the last group)
    and the first that was not; below about 1e-5 another implementation may rightly choose
    otherwise."""
    experts_TLK: torch.Tensor


def naive_forward(folder: Path, input_ids: Sequence[int]) -> NaiveOutput:
    """The model in `folder` over one whole sequence. Raises `ModelError` as `load_weights` does."""
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    names = TensorNames.find(checkpoint, config)
    names.check(checkpoint)
    return _Naive(checkpoint, names, config).forward(torch.tensor(list(input_ids)))


class _Naive:
    def __init__(self, checkpoint: Checkpoint, names: TensorNames, config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._config = config
        self._attention = NaiveAttention(self._read, config)
        self._margins: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> NaiveOutput:
        config, names = self._config, self._names
        x_TD = self._read(names.embed)[input_ids] * config.multipliers.embedding
        for index in range(config.num_layers):
            layer = names.layer(index)
            attended = self._attention(layer, self._norm(x_TD, layer["input_norm"]))
            x_TD = x_TD + attended * config.multipliers.residual
            h_TD = self._norm(x_TD, layer["post_norm"])
            sparse = index in config.moe_layers
            y_TD = self._mixture(index, layer, h_TD) if sparse else self._mlp(layer, "", h_TD)
            x_TD = x_TD + y_TD * config.multipliers.residual
        logits_TV = self._norm(x_TD, names.norm) @ self._read(names.head).T
        never = torch.full((len(x_TD),), torch.inf, dtype=torch.float64)
        nobody = torch.empty((len(x_TD), 0, 0), dtype=torch.int64)
        return NaiveOutput(
            logits_TV=logits_TV * config.multipliers.logits,
            margin_T=torch.stack((never, *self._margins)).amin(0),
            experts_TLK=torch.stack(self._chosen, 1) if self._chosen else nobody,
        )

    def _read(self, stored: Stored, item: int | None = None) -> torch.Tensor:
        return self._checkpoint.read(stored.name, item=item).double()

    def _norm(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self._read(weight) * x / (variance + self._config.rms_eps).sqrt()

    def _mixture(self, index: int, layer: Layer, h_TD: torch.Tensor) -> torch.Tensor:
        """The experts' weighted sum; keeps who they were, and the margin of the choice."""
        mixture = self._config.mixture
        assert mixture is not None
        logits_TX = h_TD @ self._read(layer["router"]).T
        sigmoid = mixture.router.score == "sigmoid"
        score_TX = 1 / (1 + torch.exp(-logits_TX)) if sigmoid else logits_TX.softmax(-1)
        bias_X = self._read(layer["router_bias"]) if mixture.router.bias else 0
        topk_TK = self._choose(score_TX + bias_X, mixture.router)
        weight_TK = score_TX.gather(1, topk_TK)
        if mixture.router.normalise:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        weight_TK = weight_TK * mixture.router.scale
        y_TD = torch.zeros_like(h_TD)
        for number in range(mixture.num_experts):
            share_T1 = ((topk_TK == number) * weight_TK).sum(-1, keepdim=True)
            y_TD = y_TD + self._expert(index, number, h_TD) * share_T1
        if mixture.shared_size:
            shared_TD = self._mlp(layer, "shared.", h_TD)
            if mixture.shared_gate:
                gate_T1 = h_TD @ self._read(layer["shared_gate"]).T
                shared_TD = shared_TD / (1 + torch.exp(-gate_T1))
            y_TD = y_TD + shared_TD
        return y_TD

    def _choose(self, choice_TX: torch.Tensor, router: Router) -> torch.Tensor:
        margin_T = torch.full((len(choice_TX),), torch.inf, dtype=torch.float64)
        if router.num_groups > 1:
            members_TNX = choice_TX.view(len(choice_TX), router.num_groups, -1)
            num_best = 1 if router.group_score == "best" else 2
            group_TN = members_TNX.sort(-1, descending=True).values[:, :, :num_best].sum(-1)
            best, order = torch.sort(group_TN, dim=-1, descending=True, stable=True)
            if router.top_groups < router.num_groups:
                margin_T = best[:, router.top_groups - 1] - best[:, router.top_groups]
            for group in range(router.num_groups):
                out_T = (order[:, : router.top_groups] != group).all(-1)
                members_TNX[out_T, group] = -torch.inf
        best, expert = torch.sort(choice_TX, dim=-1, descending=True, stable=True)
        if router.top_k < choice_TX.shape[1]:
            gap_T = best[:, router.top_k - 1] - best[:, router.top_k]
            margin_T = torch.minimum(margin_T, gap_T)
        self._margins.append(margin_T)
        self._chosen.append(expert[:, : router.top_k])
        return expert[:, : router.top_k]

    def _expert(self, layer: int, number: int, h_TD: torch.Tensor) -> torch.Tensor:
        stored = self._names.expert(layer, number)
        if not self._names.experts.stacked:
            return self._mlp(stored, "", h_TD)
        gate, up = self._read(stored["gate_up"], number).chunk(2)
        return _gated(h_TD, gate, up, self._read(stored["down"], number))

    def _mlp(self, layer: Layer, part: str, h_TD: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._read(layer[f"{part}{name}"]) for name in ("gate", "up", "down"))
        return _gated(h_TD, gate, up, down)


def _gated(
    h_TD: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    gated_TI = h_TD @ gate.T
    return (gated_TI / (1 + torch.exp(-gated_TI)) * (h_TD @ up.T)) @ down.T
