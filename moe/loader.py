"""Reads checked tensors and arranges them for one rank.

Shapes: D hidden, E head width, H query heads, A query and key heads, I width of a hidden layer,
V vocabulary, N, R, C as in `latent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from .arena import Arena
from .config import ModelConfig
from .experts import Expert
from .grouped_query import GroupedQueryAttention
from .latent import LatentAttention
from .linear import ROW_MULTIPLE, HeadwiseLinear, Linear
from .mixture import MixtureLayer
from .parts import GroupedQuery, Latent
from .rotary import halves_paired
from .router import WIDTH_MULTIPLE
from .tensor_names import Layer, Stored, TensorNames

ARENA_CHUNK_BYTES = 32 * 1024 * 1024
"""Packed weights lie side by side in pieces of this size, in the order in which they are read."""


class Tensors(Protocol):
    """Where a loader reads from: a checkpoint, or what has arrived from a trainer."""

    def read(self, name: str, *, item: int | None = None) -> torch.Tensor:
        """The tensor in its own type, or only `item` of its first dimension."""
        ...


class Loader:
    """One rank's view of tensors that have been checked."""

    def __init__(
        self,
        tensors: Tensors,
        names: TensorNames,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self._tensors = tensors
        self._names = names
        self._config = config
        self._dtype, self._device = dtype, device
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._arena = Arena(ARENA_CHUNK_BYTES)

    def read(
        self, stored: Stored, *, item: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = self._tensors.read(stored.name, item=item)
        return tensor.to(self._device, dtype or self._dtype)

    def output(self, layer: Layer) -> Linear:
        """All heads to hidden."""
        return self._linear(self.read(layer["o"]))

    def head(self) -> Linear:
        """The vocabulary in equal shares of a multiple of 16 rows; the last ones may be zero."""
        weight_VD = self.read(self._names.head)
        unit = self._tp_size * ROW_MULTIPLE if self._tp_size > 1 else 1
        return self._linear(self._share(F.pad(weight_VD, (0, 0, 0, -weight_VD.shape[0] % unit))))

    def attention(self, layer: Layer) -> GroupedQueryAttention | LatentAttention:
        match self._config.attention:
            case GroupedQuery() as sizes:
                return self._grouped_query(sizes, layer)
            case Latent() as sizes:
                return self._latent(sizes, layer)

    def feed_forward(
        self, index: int, layer: Layer, expert_ids: Sequence[int]
    ) -> MixtureLayer | Expert:
        if index not in self._config.moe_layers:
            return self._mlp(layer, "")
        sizes = self._config.mixture
        assert sizes is not None
        shared_gate = None
        if sizes.shared_gate:
            weight_1D = self.read(layer["shared_gate"])
            shared_gate = self._linear(F.pad(weight_1D, (0, 0, 0, WIDTH_MULTIPLE - 1)))
        router_type = torch.float32 if sizes.router.precise else self._dtype
        bias_X = None
        if sizes.router.bias:
            bias_X = self.read(layer["router_bias"], dtype=torch.float32)
        return MixtureLayer(
            sizes=sizes,
            router=self._linear(self.read(layer["router"], dtype=router_type)),
            router_bias_X=bias_X,
            experts=tuple(self._expert(index, number) for number in expert_ids),
            shared=self._mlp(layer, "shared.") if sizes.shared_size else None,
            shared_gate=shared_gate,
        )

    def _grouped_query(self, sizes: GroupedQuery, layer: Layer) -> GroupedQueryAttention:
        whole = sizes.norm == "row"
        parts = ("q", "k", "v")
        qkv = [self.read(layer[part]) for part in parts]
        bias = [self.read(layer[f"{part}_bias"]) for part in parts] if sizes.bias else None
        if not whole:
            qkv = [self._share(weight) for weight in qkv]
            bias = None if bias is None else [self._share(vector) for vector in bias]
        row_norms = None
        if whole:
            row_norms = tuple(self.read(layer[n]).float() for n in ("q_norm", "k_norm"))
        return GroupedQueryAttention(
            sizes=sizes,
            rms_eps=self._config.rms_eps,
            qkv=self._linear(torch.cat(qkv)),
            bias=None if bias is None else torch.cat(bias),
            head_norm_AE=self._head_norm(sizes, layer) if sizes.norm == "head" else None,
            row_norms=row_norms,  # type: ignore[arg-type]
        )

    def _head_norm(self, sizes: GroupedQuery, layer: Layer) -> torch.Tensor:
        heads = torch.tensor([sizes.num_heads, sizes.num_kv_heads]) // self._tp_size
        both = torch.stack((self.read(layer["q_norm"]), self.read(layer["k_norm"])))
        return both.repeat_interleave(heads.to(self._device), dim=0)

    def _latent(self, sizes: Latent, layer: Layer) -> LatentAttention:
        nope, rope = sizes.nope_dim, sizes.rope_dim
        has_latent = sizes.query_latent_dim is not None
        q = self._share(self.read(layer["q_up" if has_latent else "q"]))
        q = q.unflatten(0, (-1, nope + rope))
        kv_down = self.read(layer["kv_down"])
        kv_up = self._share(self.read(layer["kv_up"])).unflatten(0, (-1, nope + sizes.value_dim))
        q_rope, k_rope = q[:, nope:].flatten(0, 1), kv_down[sizes.latent_dim :]
        if sizes.interleaved:
            q_rope, k_rope = halves_paired(q_rope, rope), halves_paired(k_rope, rope)
        q = torch.cat((q[:, :nope], q_rope.unflatten(0, (-1, rope))), dim=1).flatten(0, 1)
        down = [self.read(layer["q_down"])] if has_latent else []
        return LatentAttention(
            sizes=sizes,
            down=self._linear(torch.cat((*down, kv_down[: sizes.latent_dim], k_rope))),
            q_norm=self.read(layer["q_norm"]) if has_latent else None,
            kv_norm_C=self.read(layer["kv_norm"]),
            q=self._linear(q),
            key=HeadwiseLinear(kv_up[:, :nope].transpose(1, 2)),
            value=HeadwiseLinear(kv_up[:, nope:]),
        )

    def _mlp(self, layer: Layer, part: str) -> Expert:
        gate_ID, up_ID = self.read(layer[f"{part}gate"]), self.read(layer[f"{part}up"])
        down_DI = self.read(layer[f"{part}down"])
        return Expert(gate_ID=gate_ID, up_ID=up_ID, down_DI=down_DI, arena=self._arena)

    def _expert(self, layer: int, number: int) -> Expert:
        stored = self._names.expert(layer, number)
        if not self._names.experts.stacked:
            return self._mlp(stored, "")
        gate_ID, up_ID = self.read(stored["gate_up"], item=number).chunk(2)
        down_DI = self.read(stored["down"], item=number)
        return Expert(gate_ID=gate_ID, up_ID=up_ID, down_DI=down_DI, arena=self._arena)

    def _linear(self, weight_NK: torch.Tensor) -> Linear:
        return Linear(weight_NK, self._arena)

    def _share(self, rows: torch.Tensor) -> torch.Tensor:
        """This tensor-parallel rank's part of the rows of a weight."""
        if self._tp_size == 1:
            return rows
        return rows.chunk(self._tp_size)[self._tp_rank].clone()  # so that the others' can go
