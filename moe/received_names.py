"""What a trainer has, in terms of the tensors that the model has under the hub's names.

Trainers name experts one by one as on the hub or stack those of a layer as transformers 5 does, and
wrap models, which puts a prefix before every name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .checkpoint import ITEM_BYTES
from .config import ModelConfig
from .errors import ModelError
from .expert_names import ExpertNames
from .tensor_names import Shape, TensorNames

_PREFIXES = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and torch.compile."""
_PEFT = "base_model.model."
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a tensor is, without its numbers."""

    dtype: str
    """As in safetensors: a key of `ITEM_BYTES` if it can be used."""
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor of the model lies in one that was received."""

    source: str
    item: int | None = None
    """Of its first dimension; None for all of it."""
    first: int = 0
    """Row, of the item if there is one, with which the tensor begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    shape: Shape
    parts: tuple[tuple[str, int | None, int], ...]
    """(name on the hub, item, first row) of each tensor of the model in it."""


class ReceivedNames:
    """All names under which a model's tensors are understood."""

    def __init__(self, config: ModelConfig) -> None:
        self.hub = TensorNames.hub(config)
        self.shapes: dict[str, Shape] = {stored.name: stored.shape for stored in self.hub.all()}
        """Of every tensor the model has, by its name on the hub."""
        self._config = config
        self._known = {
            name: _Known(shape=shape, parts=((name, None, 0),))
            for name, shape in self.shapes.items()
        }
        if config.tie_embeddings:
            self._known[_HEAD] = _Known(shape=self.hub.embed.shape, parts=())
        for layer in config.moe_layers:
            self._known.update(self._stacked(layer))

    def places(self, received: Mapping[str, Received]) -> dict[str, Place]:
        """Where each tensor of the model lies that is among those received.

        Raises `ModelError` for the first, by name, that is unknown, misshapen, of a type that is
        not used, or there twice.
        """
        found: dict[str, Place] = {}
        for name in sorted(received):
            known = self._known.get(_plain(name))
            if known is None:
                self._refuse_unknown(name)
                continue
            self._check(name, received[name], known)
            for hub, item, first in known.parts:
                if hub in found:
                    raise ModelError(
                        f"tensor {hub} is there twice: as {found[hub].source} and as {name}"
                    )
                found[hub] = Place(source=name, item=item, first=first)
        return found

    def check_complete(self, places: Mapping[str, Place]) -> None:
        """Raises `ModelError` unless every tensor of the model has its place."""
        refuse_missing(self.shapes, places)

    def tied_head(self, received: Mapping[str, Received]) -> str | None:
        """The name of an output head that config.json ties to the embeddings, if there is one."""
        if not self._config.tie_embeddings:
            return None
        return next((name for name in sorted(received) if _plain(name) == _HEAD), None)

    def knows(self, name: str) -> bool:
        """Whether the tensor is one of the model's, or some of them."""
        return _plain(name) in self._known

    def _stacked(self, layer: int) -> Iterator[tuple[str, _Known]]:
        """The tensors of a layer's mixture under the names of transformers 5."""
        hub, config = self.hub, self._config
        other = TensorNames(config, ExpertNames.stacked_names(config.architecture))
        router, renamed = hub.layer(layer)["router"], other.layer(layer)["router"]
        yield renamed.name, _Known(shape=router.shape, parts=((router.name, None, 0),))
        for part, stored in other.expert(layer, 0).items():
            yield stored.name, _Known(shape=stored.shape, parts=tuple(self._split(layer, part)))

    def _split(self, layer: int, part: str) -> Iterator[tuple[str, int | None, int]]:
        if self.hub.experts.stacked:
            yield self.hub.expert(layer, 0)[part].name, None, 0
            return
        for number in range(self._config.num_experts):
            expert = self.hub.expert(layer, number)
            if part == "gate_up":
                yield expert["gate"].name, number, 0
                yield expert["up"].name, number, expert["gate"].shape[0]
            else:
                yield expert[part].name, number, 0

    def _check(self, name: str, received: Received, known: _Known) -> None:
        if received.shape != known.shape:
            raise ModelError(
                f"tensor {name} has shape {list(received.shape)}, but the model asks for "
                f"{list(known.shape)}"
            )
        if received.dtype not in ITEM_BYTES:
            raise ModelError(
                f"tensor {name} has type {received.dtype}; supported are {', '.join(ITEM_BYTES)}"
            )

    def _refuse_unknown(self, name: str) -> None:
        if ".lora_" in name or _plain(name).startswith(_PEFT):
            raise ModelError(
                f"tensor {name} belongs to a LoRA adapter; supported are whole models: merge it "
                "first (peft's merge_and_unload)"
            )
        if not self.hub.is_spare(_plain(name)):
            config = self._config
            raise ModelError(
                f"tensor {name} has no place in a {config.architecture} of {config.num_layers} "
                f"layers and {config.num_experts} experts"
            )


def refuse_missing(shapes: Mapping[str, Shape], found: Mapping[str, object]) -> None:
    """Raises `ModelError` if tensors of the model were not found, naming the first."""
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise ModelError(f"tensor {missing[0]}{others} is missing: an update has all of the model")


def _plain(name: str) -> str:
    while name.startswith(_PREFIXES):
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
    return name
