"""Receive buffers of one path. Never shared between paths."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .errors import BufferInFlightError

B = TypeVar("B")


class Workspace(Generic[B]):
    """Named buffers that grow on demand and are lent to one collective at a time."""

    def __init__(self, path: str, allocate: Callable[[int], B]) -> None:
        self.path = path
        self._allocate = allocate
        self._buffers: dict[Hashable, tuple[int, B]] = {}
        self._lent: set[Hashable] = set()

    def borrow(self, key: Hashable, num_bytes: int) -> B:
        """The buffer of `key`, at least `num_bytes` long; its old content may be overwritten.

        Raises BufferInFlightError while an earlier borrower has not given it back.
        """
        if key in self._lent:
            raise BufferInFlightError(
                f"path {self.path}: buffer {key} is still owned by a collective in flight"
            )
        self._lent.add(key)
        size, buffer = self._buffers.get(key, (-1, None))
        if buffer is None or size < num_bytes:
            size = max(num_bytes, 2 * size)
            buffer = self._allocate(size)
            self._buffers[key] = size, buffer
        return buffer

    def give_back(self, key: Hashable) -> None:
        """The collective is done; the content stays until the next borrower writes it."""
        self._lent.remove(key)

    @property
    def buffers(self) -> list[B]:
        """All buffers allocated so far, lent or not."""
        return [buffer for _, buffer in self._buffers.values()]
