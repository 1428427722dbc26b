"""The accuracy reference: one sequence, float64 throughout, nothing clever, nothing shared.

Shapes: T positions, D hidden, H query heads, G key/value heads, E head width, X experts,
I expert width, K top-k, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .config import ModelConfig, read_config
from .tensor_names import TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveOutput:
    """Exact but for float64 rounding."""

    logits_TV: torch.Tensor
    margin_T: torch.Tensor
    """Over all layers, the smallest gap between the last expert chosen and the first one not;
    below about 1e-5 another implementation may rightly choose otherwise."""
    experts_TLK: torch.Tensor


def naive_forward(folder: Path, input_ids: Sequence[int]) -> NaiveOutput:
    """The model in `folder` over one whole sequence. Raises `ModelError` as `load_weights` does."""
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    names = TensorNames.find(checkpoint, config)
    names.check(checkpoint)
    reader = _Naive(checkpoint, names, config)
    x_TD = reader.read(names.embed)[torch.tensor(list(input_ids))]
    margins, chosen = [], []
    for layer in range(config.num_layers):
        x_TD = x_TD + reader.attention(layer, x_TD)
        y_TD, topk_TK, margin_T = reader.mixture(layer, x_TD)
        x_TD = x_TD + y_TD
        chosen.append(topk_TK)
        margins.append(margin_T)
    return NaiveOutput(
        logits_TV=reader.norm(x_TD, names.norm) @ reader.read(names.head).T,
        margin_T=torch.stack(margins).amin(0),
        experts_TLK=torch.stack(chosen, 1),
    )


class _Naive:
    def __init__(self, checkpoint: Checkpoint, names: TensorNames, config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._config = config

    def read(self, name: str, *, item: int | None = None) -> torch.Tensor:
        return self._checkpoint.read(name, item=item).double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.read(name) * x / (variance + self._config.rms_eps).sqrt()

    def attention(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        config, names = self._config, self._names.layer(layer)
        num_positions = len(x_TD)
        h_TD = self.norm(x_TD, names.input_norm)
        q, k, v = (
            (h_TD @ self.read(name).T).view(num_positions, -1, config.head_dim)
            for name in (names.q, names.k, names.v)
        )
        if config.qk_norm:
            q, k = self.norm(q, names.q_norm), self.norm(k, names.k_norm)
        q, k = self._rotate(q), self._rotate(k)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("thd,shd->hts", q, k) / config.head_dim**0.5
        later = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        weight = score.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weight, v).reshape(num_positions, -1)
        return mixed @ self.read(names.o).T

    def mixture(
        self, layer: int, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The experts' weighted sum, who they were, and the margin of the choice."""
        config, names = self._config, self._names.layer(layer)
        h_TD = self.norm(x_TD, names.post_norm)
        probability_TX = (h_TD @ self.read(names.router).T).softmax(-1)
        best, expert = torch.sort(probability_TX, dim=-1, descending=True, stable=True)
        weight_TK, topk_TK = best[:, : config.top_k], expert[:, : config.top_k]
        if config.norm_topk:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        y_TD = torch.zeros_like(x_TD)
        for number in range(config.num_experts):
            share_T1 = ((topk_TK == number) * weight_TK).sum(-1, keepdim=True)
            y_TD = y_TD + self._expert(layer, number, h_TD) * share_T1
        if config.top_k == config.num_experts:
            return y_TD, topk_TK, torch.full((len(x_TD),), torch.inf, dtype=torch.float64)
        return y_TD, topk_TK, best[:, config.top_k - 1] - best[:, config.top_k]

    def _expert(self, layer: int, number: int, h_TD: torch.Tensor) -> torch.Tensor:
        names = self._names.expert(layer, number)
        item = number if self._names.stacked else None
        if names.gate_up is None:
            gate, up = self.read(names.gate), self.read(names.up)
        else:
            gate, up = self.read(names.gate_up, item=item).chunk(2)
        gated_TI = h_TD @ gate.T
        hidden_TI = gated_TI / (1 + torch.exp(-gated_TI)) * (h_TD @ up.T)
        return hidden_TI @ self.read(names.down, item=item).T

    def _rotate(self, x_THE: torch.Tensor) -> torch.Tensor:
        width = self._config.head_dim
        half = width // 2
        frequency = self._config.rope_theta ** -(
            torch.arange(half, dtype=torch.float64) * 2 / width
        )
        angle = (torch.arange(len(x_THE), dtype=torch.float64)[:, None] * frequency)[:, None]
        first, second = x_THE[..., :half], x_THE[..., half:]
        return torch.cat(
            (
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ),
            dim=-1,
        )
