"""Which weights keys and values were computed with, and which of them may still be used."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

Reuse = Literal["current", "stale"]


class KVVersions:
    """The versions a group has installed. Only their order counts: no clock, no tensors.

    A row of the cache is stamped with the first version that had its weights, so that a version
    with the same weights as the one before (only its number is new) changes nothing.
    """

    def __init__(self, *, max_staleness: int | None = None, reuse: Reuse = "current") -> None:
        """`max_staleness`: no token attends to keys and values of weights that have been replaced
        more often than this; None: no bound. `reuse`: what a new turn may find in the prefix tree,
        rows of the weights in use ("current") or also older ones within the bound ("stale")."""
        self._max_staleness, self._reuse = max_staleness, reuse
        self._firsts, self._lasts = [0], [0]

    @property
    def version(self) -> int:
        """In use."""
        return self._lasts[-1]

    @property
    def stamp(self) -> int:
        """Of rows that are computed now."""
        return self._firsts[-1]

    def install(self, version: int, *, same: bool) -> None:
        """`version` is in use from now on; `same`: with the weights of the one before."""
        assert version > self.version, f"version {self.version} is followed by {version}"
        if same:
            self._lasts[-1] = version
        else:
            self._firsts.append(version)
            self._lasts.append(version)

    def number(self, stamp: int) -> int:
        """The newest version that had these weights: the one in use, if it still does."""
        return self._lasts[bisect_right(self._firsts, stamp) - 1]

    @property
    def oldest(self) -> int:
        """Oldest stamp that a token may attend to."""
        if self._max_staleness is None:
            return 0
        return self._firsts[max(0, len(self._firsts) - 1 - self._max_staleness)]

    @property
    def oldest_reused(self) -> int:
        """Oldest stamp that a new turn may find in the prefix tree."""
        return self.stamp if self._reuse == "current" else self.oldest
