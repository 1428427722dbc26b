"""The accuracy reference's attention: keys and values of all heads in full, float64, no cache.

Shapes: T positions, D hidden, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .config import ModelConfig
from .parts import GroupedQuery, Latent, Yarn
from .rotary import frequencies
from .tensor_names import Layer, Stored

LATENT_EPS = 1e-6


class NaiveAttention:
    """One sequence's attention in any layer; reads weights as it goes."""

    def __init__(self, read: Callable[[Stored], torch.Tensor], config: ModelConfig) -> None:
        self._read = read
        self._config = config

    def __call__(self, layer: Layer, h_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] what attention adds for normalised rows."""
        match self._config.attention:
            case GroupedQuery() as sizes:
                q, k, v = self._grouped_query(sizes, layer, h_TD)
            case Latent() as sizes:
                q, k, v = self._latent(sizes, layer, h_TD)
        num_positions = len(h_TD)
        score = torch.einsum("thd,shd->hts", q, k) * sizes.scale
        later = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        weight = score.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weight, v).reshape(num_positions, -1)
        return mixed @ self._read(layer["o"]).T

    def _grouped_query(
        self, sizes: GroupedQuery, layer: Layer, h_TD: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = (h_TD @ self._read(layer[part]).T for part in ("q", "k", "v"))
        if sizes.bias:
            q, k, v = (
                rows + self._read(layer[part])
                for rows, part in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
            )
        eps = self._config.rms_eps
        if sizes.norm == "row":
            q, k = self._norm(q, layer["q_norm"], eps), self._norm(k, layer["k_norm"], eps)
        q, k, v = (rows.view(len(h_TD), -1, sizes.head_dim) for rows in (q, k, v))
        if sizes.norm == "head":
            q, k = self._norm(q, layer["q_norm"], eps), self._norm(k, layer["k_norm"], eps)
        group = sizes.num_heads // sizes.num_kv_heads
        k, v = self._rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return self._rotate(q), k, v

    def _latent(self, sizes: Latent, layer: Layer, h_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if sizes.query_latent_dim is None:
            q = h_TD @ self._read(layer["q"]).T
        else:
            down = h_TD @ self._read(layer["q_down"]).T
            q = self._norm(down, layer["q_norm"], LATENT_EPS) @ self._read(layer["q_up"]).T
        q_nope, q_rope = q.view(len(h_TD), sizes.num_heads, -1).split(
            (sizes.nope_dim, sizes.rope_dim), -1
        )
        latent, k_rope = (h_TD @ self._read(layer["kv_down"]).T).split(
            (sizes.latent_dim, sizes.rope_dim), -1
        )
        up = self._norm(latent, layer["kv_norm"], LATENT_EPS) @ self._read(layer["kv_up"]).T
        k_nope, v = up.view(len(h_TD), sizes.num_heads, -1).split(
            (sizes.nope_dim, sizes.value_dim), -1
        )
        rotated = self._rotate(k_rope[:, None], sizes.interleaved)
        k = torch.cat((k_nope, rotated.expand(-1, sizes.num_heads, -1)), -1)
        return torch.cat((q_nope, self._rotate(q_rope, sizes.interleaved)), -1), k, v

    def _norm(self, x: torch.Tensor, weight: Stored, eps: float) -> torch.Tensor:
        return self._read(weight) * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def _rotate(self, x_THE: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        rotary, width = self._config.rotary, x_THE.shape[-1]
        position = torch.arange(len(x_THE), dtype=torch.float64)
        angle = (position[:, None] * frequencies(rotary, width))[:, None]
        amplitude = rotary.scaling.amplitude if isinstance(rotary.scaling, Yarn) else 1.0
        if interleaved:
            first, second = x_THE[..., 0::2], x_THE[..., 1::2]
        else:
            first, second = x_THE.chunk(2, -1)
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        return torch.cat(turned, -1) * amplitude
