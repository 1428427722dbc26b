"""One rank's share of a model's weights, ready to multiply with.

Shapes: D hidden, E head width, H query heads, G key/value heads, X experts, I expert width,
V vocabulary, P positions, A = H + G heads that are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .checkpoint import Checkpoint
from .config import ModelConfig
from .experts import Expert
from .linear import ROW_MULTIPLE, Linear
from .tensor_names import TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; experts are this rank's own, in the order of `Weights.expert_ids`."""

    input_norm_D: torch.Tensor
    qkv: Linear
    """This tensor-parallel rank's query heads, then its key heads, then its value heads."""
    qk_norm_AE: torch.Tensor | None
    """Per-head norm weights of queries and keys, one row a head; None: not normalised."""
    o: Linear
    """All heads to hidden: whole on every rank, so that no sum crosses ranks."""
    post_norm_D: torch.Tensor
    router: Linear
    experts: tuple[Expert, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version on one rank. Nothing writes to it; an update is a new object."""

    version: int
    dtype: torch.dtype
    device: torch.device
    tp_rank: int
    tp_size: int
    expert_ids: tuple[int, ...]
    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head: Linear
    """This tensor-parallel rank's share of the vocabulary, padded to equal shares."""
    cos_PE: torch.Tensor
    sin_PE: torch.Tensor
    """float32 rotary tables; sin is negative in the first half of E, see `model.rotate`."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    expert_ids: Sequence[int],
    dtype: torch.dtype,
    version: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: str | torch.device = "cpu",
) -> Weights:
    """The weights a rank needs: all that is replicated, its heads and its experts.

    Every tensor the model has, this rank's or not, is checked by name, shape and type before the
    first one is read: all ranks see the same `ModelError`. Understands one tensor per expert (the
    hub's layout) and experts stacked in one (transformers 5). Raises ValueError when `tp_size` does
    not divide the key/value heads.
    """
    check_tp_size(config, tp_size)
    checkpoint = Checkpoint(folder)
    names = TensorNames.find(checkpoint, config)
    names.check(checkpoint)
    loader = _Loader(checkpoint, names, config, dtype, torch.device(device), tp_rank, tp_size)
    cos_PE, sin_PE = rotary_tables(config)
    return Weights(
        version=version,
        dtype=dtype,
        device=loader.device,
        tp_rank=tp_rank,
        tp_size=tp_size,
        expert_ids=tuple(expert_ids),
        embed_VD=loader.read(names.embed),
        layers=tuple(loader.layer(i, expert_ids) for i in range(config.num_layers)),
        norm_D=loader.read(names.norm),
        head=loader.head(),
        cos_PE=cos_PE.to(device),
        sin_PE=sin_PE.to(device),
    )


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raises ValueError unless every rank gets the same number of whole heads."""
    if config.num_kv_heads % tp_size:
        raise ValueError(
            f"tensor parallelism of {tp_size} cannot divide {config.num_kv_heads} key/value heads"
        )


def rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [P, E], computed in float64 and rounded once to float32."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    position = torch.arange(config.max_positions, dtype=torch.float64)
    angle = position[:, None] * config.rope_theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).float(), torch.cat((-sin, sin), 1).float()


class _Loader:
    """Reads checked tensors and arranges them for one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: TensorNames,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._config = config
        self._dtype = dtype
        self.device = device
        self._tp_rank = tp_rank
        self._tp_size = tp_size

    def read(self, name: str, *, item: int | None = None) -> torch.Tensor:
        return self._checkpoint.read(name, item=item).to(self.device, self._dtype)

    def layer(self, index: int, expert_ids: Sequence[int]) -> LayerWeights:
        names = self._names.layer(index)
        return LayerWeights(
            input_norm_D=self.read(names.input_norm),
            qkv=Linear(torch.cat([self._share(self.read(n)) for n in (names.q, names.k, names.v)])),
            qk_norm_AE=self._qk_norm(names.q_norm, names.k_norm) if self._config.qk_norm else None,
            o=Linear(self.read(names.o)),
            post_norm_D=self.read(names.post_norm),
            router=Linear(self.read(names.router)),
            experts=tuple(self._expert(index, expert) for expert in expert_ids),
        )

    def head(self) -> Linear:
        """The vocabulary in equal shares of a multiple of 16 rows; the last ones may be zero."""
        weight_VD = self.read(self._names.head)
        unit = self._tp_size * ROW_MULTIPLE if self._tp_size > 1 else 1
        return Linear(self._share(F.pad(weight_VD, (0, 0, 0, -weight_VD.shape[0] % unit))))

    def _share(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self._tp_size)[self._tp_rank]

    def _qk_norm(self, q_norm: str, k_norm: str) -> torch.Tensor:
        config = self._config
        heads = torch.tensor([config.num_heads, config.num_kv_heads]) // self._tp_size
        both = torch.stack((self.read(q_norm), self.read(k_norm)))
        return both.repeat_interleave(heads.to(self.device), dim=0)

    def _expert(self, layer: int, expert: int) -> Expert:
        names = self._names.expert(layer, expert)
        item = expert if self._names.stacked else None
        if names.gate_up is not None:
            gate_ID, up_ID = self.read(names.gate_up, item=item).chunk(2)
        else:
            gate_ID, up_ID = self.read(names.gate), self.read(names.up)
        return Expert(gate_ID=gate_ID, up_ID=up_ID, down_DI=self.read(names.down, item=item))
