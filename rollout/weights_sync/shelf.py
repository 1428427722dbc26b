"""The versions of the weights that a rank holds: one in use, and those it may be told to use."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from interlace.moe.weights import Weights
from interlace.rollout.messages import UpdateMode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    weights: Weights
    digest: str


class Shelf:
    """Filled by the thread that stages, emptied by the loop; both may call at any time."""

    def __init__(self, weights: Weights) -> None:
        self.in_use = weights
        self.digest = ""
        """Of the weights in use; empty for those a rank started with."""
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._committed: dict[int, UpdateMode] = {}
        self._discarded: set[int] = set()

    def put(self, weights: Weights, digest: str) -> None:
        """A version is complete and checked."""
        with self._lock:
            self._discarded.discard(weights.version)
            self._held[weights.version] = _Held(weights=weights, digest=digest)

    def commit(self, version: int, mode: UpdateMode) -> None:
        """All ranks hold it. One that is not held is not announced."""
        with self._lock:
            if version in self._held and version not in self._discarded:
                self._committed[version] = mode

    def discard(self, version: int) -> None:
        """It is not wanted. It stays until `ready` is asked again: a step that has begun may have
        agreed on it."""
        with self._lock:
            self._discarded.add(version)

    def ready(self) -> int:
        """The newest version that is committed; that in use if there is none."""
        with self._lock:
            for version in self._discarded:
                self._held.pop(version, None)
                self._committed.pop(version, None)
            self._discarded.clear()
            return max((*self._committed, self.in_use.version))

    def install(self, version: int) -> Weights:
        """That version is in use from now on; older ones are gone."""
        with self._lock:
            held = self._held[version]
            self.in_use, self.digest = held.weights, held.digest
            self._held = {number: h for number, h in self._held.items() if number > version}
            self._committed = {n: mode for n, mode in self._committed.items() if n >= version}
            return held.weights

    def mode_of(self, version: int) -> UpdateMode:
        """How a committed version is to be installed; asked until the next one is."""
        with self._lock:
            return self._committed[version]
