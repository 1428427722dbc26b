"""Updates at token positions: which trajectories an update waits for, and which wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class Barrier:
    """Is told what has happened and answers what may; from any thread.

    The set of trajectories of a version is closed: one that is not in it has position 0, and waits
    for the version before its first token.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change`: called when a trajectory has come to a position or has ended."""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._positions: dict[int, dict[int, int]] = {}
        self._held: dict[int, set[int]] = {}
        self._ended: set[int] = set()

    def at(self, positions: Mapping[int, Mapping[int, int]]) -> None:
        """Schedule versions: {version: {trajectory: sampled tokens}}.

        ValueError for a version that is scheduled already, for negative positions, and for one that
        lies before that of an older version.
        """
        with self._lock:
            self._positions = self._with(positions)

    def _with(self, positions: Mapping[int, Mapping[int, int]]) -> dict[int, dict[int, int]]:
        for version in positions:
            if version in self._positions:
                raise ValueError(f"version {version} has its positions already")
        planned = self._positions | {v: dict(found) for v, found in positions.items()}
        last: dict[int, int] = {}
        for version in sorted(planned):
            for trajectory in sorted(last.keys() | planned[version].keys()):
                position, older = planned[version].get(trajectory, 0), last.get(trajectory, 0)
                if position < older:
                    raise ValueError(
                        f"version {version} at {position} tokens of trajectory {trajectory}: the "
                        f"version before it comes at {older}"
                    )
                last[trajectory] = position
        return planned

    def holds(self, trajectory: int, num_sampled: int) -> list[tuple[int, int]]:
        """(tokens that a turn may still sample, version) for a trajectory that has sampled so many
        before; by version."""
        return [
            (found.get(trajectory, 0) - num_sampled, version)
            for version, found in sorted(self._positions.items())
            if found.get(trajectory, 0) >= num_sampled
        ]

    def held(self, trajectory: int, version: int) -> None:
        """The trajectory has come to its position and waits there."""
        with self._lock:
            self._held.setdefault(version, set()).add(trajectory)
        self._on_change()

    def ended(self, trajectory: int) -> None:
        """The trajectory samples nothing any more."""
        with self._lock:
            if self._positions:
                self._ended.add(trajectory)
        self._on_change()

    def missing(self, version: int) -> list[int]:
        """The trajectories that a version still waits for; none if it was not scheduled."""
        with self._lock:
            arrived = self._held.get(version, set()) | self._ended
            return sorted(self._positions.get(version, {}).keys() - arrived)

    def reached(self, version: int) -> bool:
        """Whether the version may be committed."""
        return not self.missing(version)

    def installed(self, version: int) -> None:
        """The version is in use: nobody waits for it, or for an older one, any more."""
        with self._lock:
            self._positions = {v: found for v, found in self._positions.items() if v > version}
            self._held = {v: found for v, found in self._held.items() if v > version}
            if not self._positions:
                self._ended.clear()
