"""The tensors of a model folder: names, types, shapes and places, known before any is read.

Only safetensors files are opened. Their headers (https://github.com/huggingface/safetensors,
"Format") are parsed and checked against the file's size here, so that a truncated download is an
error at once and not after gigabytes have been allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import ModelError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Tensor types that can be read, with the bytes of one element."""
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Where a tensor lies and what it is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of one folder. Headers are read on construction, bytes only by `read`."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` for missing shards, other formats and damaged or short files."""
        self.folder = folder
        self.headers: Mapping[str, TensorHeader] = _read_headers(folder)
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises `ModelError` unless the tensor is there with this shape and a readable type."""
        header = self.headers.get(name)
        if header is None:
            raise ModelError(
                f"{self.folder}: tensor {name} is in none of its safetensors files; the download "
                f"may be incomplete or config.json may belong to another model"
            )
        if header.shape != shape:
            raise ModelError(
                f"{header.file}: tensor {name} has shape {list(header.shape)}, but config.json "
                f"asks for {list(shape)}"
            )
        if header.dtype not in ITEM_BYTES:
            raise ModelError(
                f"{header.file}: tensor {name} has type {header.dtype}; supported are "
                f"{', '.join(ITEM_BYTES)} (use the unquantised checkpoint)"
            )

    def read(self, name: str, *, item: int | None = None) -> torch.Tensor:
        """The tensor in its own type, or only `item` of its first dimension."""
        if item is None:
            return self._get(name, lambda file: file.get_tensor(name))
        return self._get(name, lambda file: file.get_slice(name)[item])

    def read_rows(
        self, name: str, first: int, last: int, *, item: int | None = None
    ) -> torch.Tensor:
        """Some rows of the tensor in its own type, or of `item` of its first dimension."""
        rows = slice(first, last)
        at = rows if item is None else (item, rows)
        return self._get(name, lambda file: file.get_slice(name)[at])

    def _get(self, name: str, get: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        path = self.headers[name].file
        try:
            if path not in self._open:
                self._open[path] = safe_open(str(path), framework="pt")
            return get(self._open[path])
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged safetensors file ({error})") from None


def _read_headers(folder: Path) -> dict[str, TensorHeader]:
    return {name: header for path in _files(folder) for name, header in _file_headers(path)}


def _files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.exists():
        return [single]
    if index.exists():
        return _shards(index)
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if others:
        raise ModelError(
            f"{folder}: only {others[0]} found; such files can run code when opened, so they are "
            f"not: safetensors is needed (transformers' save_pretrained writes it)"
        )
    raise ModelError(f"{folder}: neither model.safetensors nor {_INDEX} is there")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: no usable weight_map ({error!r}); download it again") from None
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map names {name!r}, which is outside the folder")
        if not (index.parent / name).exists():
            raise ModelError(f"{index}: weight_map names {name}, which is missing; download it")
    return [index.parent / name for name in names]


def _file_headers(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path}: not a whole safetensors file; download it again")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            parsed = [
                (
                    n,
                    str(e["dtype"]),
                    tuple(map(int, e["shape"])),
                    tuple(map(int, e["data_offsets"])),
                )
                for n, e in entries.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path}: damaged safetensors header ({error!r})") from None
    for name, dtype, shape, (begin, end) in parsed:
        if 8 + length + end > size:
            raise ModelError(
                f"{path}: truncated: tensor {name} ends at byte {8 + length + end}, the file at "
                f"{size}; download it again"
            )
        if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ModelError(
                f"{path}: tensor {name} has {end - begin} bytes, which is not {dtype} of shape "
                f"{list(shape)}"
            )
        yield name, TensorHeader(file=path, dtype=dtype, shape=shape)
