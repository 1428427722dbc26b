"""Where new weights come from: a trainer's dictionary, or a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from interlace.moe.checkpoint import Checkpoint
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.incoming import TYPES
from interlace.moe.received_names import Received, ReceivedNames

_NAMES = {dtype: name for name, dtype in TYPES.items()}


class StateDict:
    """Tensors of this process, on any device. See `Origin`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises `ModelError` for what is no plain tensor."""
        for name, tensor in tensors.items():
            kind = type(tensor).__name__
            if not isinstance(tensor, torch.Tensor) or kind == "DTensor":
                raise ModelError(
                    f"tensor {name} is a {kind}; supported are plain tensors: gather sharded ones "
                    "first (full_tensor())"
                )
            if tensor.layout != torch.strided or tensor.is_meta:
                raise ModelError(f"tensor {name} is sparse or has no numbers")
        self._tensors = tensors

    def received(self) -> dict[str, Received]:
        """See Origin."""
        return {
            name: Received(
                dtype=_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
                shape=tuple(tensor.shape),
            )
            for name, tensor in self._tensors.items()
        }

    def rows(self, name: str, item: int | None, first: int, last: int) -> torch.Tensor:
        """See Origin."""
        tensor = self._tensors[name].detach()
        if item is not None:
            tensor = tensor[item]
        return tensor[first:last].cpu().contiguous()


class Folder:
    """The safetensors files of a folder in Hugging Face format. See `Origin`."""

    def __init__(self, folder: Path, names: ReceivedNames | None = None) -> None:
        """With `names` only what these know is there. Raises `ModelError` as `Checkpoint` does."""
        self._checkpoint = Checkpoint(folder)
        self._received = {
            name: Received(dtype=header.dtype, shape=header.shape)
            for name, header in self._checkpoint.headers.items()
            if names is None or names.knows(name)
        }

    def received(self) -> dict[str, Received]:
        """See Origin."""
        return self._received

    def rows(self, name: str, item: int | None, first: int, last: int) -> torch.Tensor:
        """See Origin."""
        return self._checkpoint.read_rows(name, first, last, item=item).contiguous()


def check_same_model(folder: Path, config: ModelConfig) -> None:
    """Raises `ModelError` if the folder says, in its config.json, that it is another model."""
    if not (folder / "config.json").exists():
        return
    other = read_config(folder)
    for name in (field.name for field in fields(config)):
        mine, theirs = getattr(config, name), getattr(other, name)
        if mine != theirs and name not in ("dtype", "eos_token_ids"):
            raise ModelError(
                f"{folder}: config.json says {name} {theirs!r}, the model that generates has "
                f"{mine!r}"
            )


def allowed_folder(folder: Path, root: str | None) -> Path:
    """The folder without links, if it and its files lie under `root`. Raises `ModelError`."""
    if root is None:
        raise ModelError(
            f"{folder}: no weights are read from disk: set weights.root to a folder above it"
        )
    top, found = Path(root).expanduser().resolve(), folder.expanduser().resolve()
    if not found.is_dir():
        raise ModelError(f"{folder}: no such folder")
    for path in (found, *sorted(found.glob("*.safetensors")), *sorted(found.glob("*.json"))):
        if not path.resolve().is_relative_to(top):
            raise ModelError(f"{path} leads to {path.resolve()}, which is not under weights.root")
    return found
