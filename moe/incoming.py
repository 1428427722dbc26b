"""The tensors of a model as they arrive at a rank: all are checked, its own are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .checkpoint import ITEM_BYTES
from .config import ModelConfig
from .tensor_digests import TensorDigests
from .tensor_names import Shape, TensorNames

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank keeps of a model, by the hub's names; made once, it serves every update."""

    shapes: Mapping[str, Shape]
    """Of all tensors of the model."""
    expert_ids: tuple[int, ...]
    """This rank's."""
    by_item: frozenset[str]
    """Tensors of all experts of a layer, of which it keeps its own."""
    foreign: frozenset[str]
    """Tensors of which it keeps nothing."""
    read_twice: str | None
    """Embeddings that are the output head too."""

    @classmethod
    def of(cls, config: ModelConfig, expert_ids: Sequence[int]) -> Share:
        names = TensorNames.hub(config)
        others = sorted(set(range(config.num_experts)).difference(expert_ids))
        by_item: set[str] = set()
        foreign: set[str] = set()
        for layer in config.moe_layers:
            if names.experts.stacked:
                by_item.update(stored.name for stored in names.expert(layer, 0).values())
                continue
            for number in others:
                foreign.update(stored.name for stored in names.expert(layer, number).values())
        return cls(
            shapes={stored.name: stored.shape for stored in names.all()},
            expert_ids=tuple(expert_ids),
            by_item=frozenset(by_item),
            foreign=frozenset(foreign),
            read_twice=names.embed.name if config.tie_embeddings else None,
        )


class Incoming:
    """What a `Loader` reads from.

    Copies and hashes without the interpreter's lock, so that other threads go on.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._digests = TensorDigests(share.shapes)
        self._kept: dict[_Key, torch.Tensor] = {}
        self.num_bytes = 0
        """Bytes of what has been kept so far."""

    def add(self, name: str, dtype: str, shape: Shape, first: int, data: memoryview) -> None:
        """Rows of a tensor from `first` on, in order. Raises `ModelError` as `TensorDigests`."""
        num_rows = self._digests.add(name, dtype, shape, first, data)
        raw = np.frombuffer(data, dtype=np.uint8)
        if name in self._share.by_item:
            size = raw.size // num_rows
            for number in self._share.expert_ids:
                at = (number - first) * size
                if 0 <= at < raw.size:
                    self._keep((name, number), dtype, shape[1:], 0, raw[at : at + size])
        elif name not in self._share.foreign:
            row_bytes = math.prod(shape[1:]) * ITEM_BYTES[dtype]
            self._keep((name, None), dtype, shape, first * row_bytes, raw)

    def total(self) -> str:
        """The digest of all tensors. Raises `ModelError` unless the model is complete."""
        return self._digests.total()

    def digest_of(self, name: str) -> bytes | None:
        """The digest of one tensor that has arrived."""
        return self._digests.of(name)

    def read(self, name: str, *, item: int | None = None) -> torch.Tensor:
        """The tensor in its own type, or an item of it. It is given away: each is read once, but
        for embeddings that are also the output head."""
        if name == self._share.read_twice:
            return self._kept[name, item]
        return self._kept.pop((name, item))

    def _keep(self, key: _Key, dtype: str, shape: Shape, at: int, raw: NDArray[np.uint8]) -> None:
        kept = self._kept.get(key)
        if kept is None:
            num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            kept = self._kept[key] = memory.view(TYPES[dtype]).view(shape)
            self.num_bytes += num_bytes
        into = kept.view(-1).view(torch.uint8).numpy()
        np.copyto(into[at : at + raw.size], raw)
