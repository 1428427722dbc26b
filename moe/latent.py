"""Multi-head latent attention, from rows to heads.

A head's key is a projection of the latent, so its query is projected into the latent's space
instead, once a row; likewise its value is projected after the weighted sum. The cache then holds
one latent and one rotated key a token, and all heads read them as one key/value head.

Shapes: T rows, U this rank's share of them, D hidden, H query heads of this rank, N width without
position, R rotated width, C latent width, V value width, X what is gathered of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .attention import block_attention
from .batch import Batch
from .context import PathContext
from .linear import HeadwiseLinear, Linear
from .parts import Latent
from .rotary import rotate

LATENT_EPS = 1e-6
"""Of the norms of latents; the architecture fixes it apart from the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One layer's projections on one tensor-parallel rank, and the arithmetic with them."""

    sizes: Latent
    down: Linear
    """Hidden to the query's latent if it has one, then the latent, then the key to rotate."""
    q_norm: torch.Tensor | None
    kv_norm_C: torch.Tensor
    q: Linear
    """From the query's latent, or from hidden, to this rank's H * (N + R)."""
    key: HeadwiseLinear
    """N -> C: a query into the latent's space."""
    value: HeadwiseLinear
    """C -> V: a weighted sum of latents out of it."""

    def own_rows(self, h_UD: torch.Tensor) -> torch.Tensor:
        """[U, X] query latent (or hidden state), latent and key to rotate: all normalised."""
        sizes = self.sizes
        down = self.down(h_UD)
        latent = down[:, -sizes.latent_dim - sizes.rope_dim : -sizes.rope_dim]
        latent = F.rms_norm(latent, latent.shape[1:], self.kv_norm_C, LATENT_EPS)
        rope = down[:, -sizes.rope_dim :]
        if self.q_norm is None:
            return torch.cat((h_UD, latent, rope), dim=1)
        q = down[:, : sizes.query_latent_dim]
        q = F.rms_norm(q, q.shape[1:], self.q_norm, LATENT_EPS)
        return torch.cat((q, latent, rope), dim=1)

    def queries(
        self,
        context: PathContext,
        batch: Batch,
        index: int,
        rows_TX: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[real T, H, C + R]; writes the rows' latents and keys. Padding rows stop here."""
        sizes, num_rows = self.sizes, batch.num_rows
        behind = sizes.latent_dim + sizes.rope_dim
        latent_T1C = rows_TX[:num_rows, None, -behind : -sizes.rope_dim]
        rope_T1R = rows_TX[:num_rows, None, -sizes.rope_dim :]
        q = self.q(rows_TX[:, :-behind])[:num_rows]
        q = q.unflatten(1, (-1, sizes.nope_dim + sizes.rope_dim))
        rotated = torch.cat((q[..., sizes.nope_dim :], rope_T1R), dim=1).float()
        rotated = rotate(rotated, *rotation).to(q.dtype)
        context.kv.write(index, batch.slot_mapping, latent=latent_T1C, rope=rotated[:, -1:])
        q_THC = self.key(q[..., : sizes.nope_dim])
        return torch.cat((q_THC, rotated[:, :-1]), dim=-1)

    def attend(
        self,
        context: PathContext,
        batch: Batch,
        index: int,
        q_THE: torch.Tensor,
    ) -> torch.Tensor:
        """[real T, H * V]"""
        latent, rope = context.kv.plane(index, "latent"), context.kv.plane(index, "rope")
        mixed_THC = block_attention(q_THE, (latent, rope), latent, batch, scale=self.sizes.scale)
        return self.value(mixed_THC).flatten(1)
