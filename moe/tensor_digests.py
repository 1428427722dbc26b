"""A digest of all tensors of a model, made while they pass by in pieces.

Per tensor sha256 over name, type, shape and bytes; then over these in the order of their names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import ITEM_BYTES
from .errors import ModelError
from .received_names import refuse_missing
from .tensor_names import Shape


@dataclass(slots=True, kw_only=True)
class _Passing:
    dtype: str
    num_rows: int
    sha: Any


class TensorDigests:
    """Counts and checks pieces: each tensor once, from its first row to its last."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        """`shapes`: of every tensor there is to come, by name."""
        self._shapes = shapes
        self._passing: dict[str, _Passing] = {}
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, dtype: str, shape: Shape, first: int, data: memoryview) -> int:
        """Take in the rows from `first` on; returns the number of rows.

        Raises `ModelError` for an unknown, repeated or misshapen tensor, another type than before
        or rows out of order.
        """
        num_rows = self._check(name, dtype, shape, first, data.nbytes)
        passing = self._passing.get(name)
        if passing is None:
            sha = begun(name, dtype, shape)
            passing = self._passing[name] = _Passing(dtype=dtype, num_rows=0, sha=sha)
        if (passing.dtype, passing.num_rows) != (dtype, first):
            raise ModelError(
                f"tensor {name}: row {first} of type {dtype} follows {passing.num_rows} rows of "
                f"type {passing.dtype}"
            )
        passing.sha.update(data)
        passing.num_rows += num_rows
        if passing.num_rows == shape[0]:
            self._digests[name] = self._passing.pop(name).sha.digest()
        return num_rows

    def of(self, name: str) -> bytes | None:
        """The digest of one tensor; None if it has not passed to its last row."""
        return self._digests.get(name)

    def total(self) -> str:
        """The digest of all. Raises `ModelError` unless every tensor has passed."""
        refuse_missing(self._shapes, self._digests)
        return hashlib.sha256(b"".join(self._digests[n] for n in sorted(self._digests))).hexdigest()

    def _check(self, name: str, dtype: str, shape: Shape, first: int, num_bytes: int) -> int:
        wanted = self._shapes.get(name)
        if wanted is None:
            raise ModelError(f"tensor {name} is not one of the model's")
        if name in self._digests:
            raise ModelError(f"tensor {name} came twice")
        if shape != wanted or dtype not in ITEM_BYTES:
            raise ModelError(
                f"tensor {name} of type {dtype} and shape {list(shape)}: the model asks for "
                f"{list(wanted)} and one of {', '.join(ITEM_BYTES)}"
            )
        row_bytes = math.prod(shape[1:]) * ITEM_BYTES[dtype]
        num_rows, rest = divmod(num_bytes, row_bytes)
        if rest or not 0 < num_rows <= shape[0] - first:
            raise ModelError(f"tensor {name}: {num_bytes} bytes from row {first} on are no rows")
        return num_rows


def begun(name: str, dtype: str, shape: Shape) -> Any:
    """A sha256 that has seen everything of a tensor but its bytes."""
    return hashlib.sha256(f"{name}\n{dtype}\n{','.join(map(str, shape))}\n".encode())
