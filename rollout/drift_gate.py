"""A gate for a training loop at learning rate 0: the gap to the trainer must not grow."""

from __future__ import annotations

from collections.abc import Sequence

from .mismatch import VersionMismatch


class DriftError(RuntimeError):
    """The gap grows over steps though the weights do not change: something else does."""


class DriftGate:
    """Told the gap after every step of a loop whose learning rate is 0; raises when it grows.

    With the weights unchanged, rollout and trainer compute the same function at every step, so
    their gap only varies with the tokens drawn. One that grows comes from the rollout itself: old
    keys and values, weights that were not installed, buffers that were not reset.
    """

    def __init__(self, *, num_first: int = 2, factor: float = 1.5, floor: float = 1e-5) -> None:
        """The first `num_first` steps say how large the gap is: their largest mean |d|. A later
        step may exceed that by `factor`, and gaps below `floor` (nats) count as none. ValueError
        for numbers that would let everything, or nothing, pass."""
        if num_first < 1 or factor <= 1 or floor < 0:
            raise ValueError(
                f"num_first is at least 1, factor above 1, floor from 0 on; found {num_first}, "
                f"{factor} and {floor}"
            )
        self._num_first, self._factor, self._floor = num_first, factor, floor
        self._digest: str | None = None
        self.gaps: list[float] = []
        """Mean |d| of every step so far."""

    def check(self, rows: Sequence[VersionMismatch], weights_digest: str) -> float:
        """Take a step's rows (see `mismatch`) and give its mean |d|.

        `weights_digest`: that of the weights served (`Rollout.weights_digest`). Raises DriftError
        if the gap has grown; ValueError if the weights have changed, or there are no tokens.
        """
        if self._digest is not None and weights_digest != self._digest:
            raise ValueError(
                f"the weights changed at step {len(self.gaps)}, from digest {self._digest[:12]} to "
                f"{weights_digest[:12]}: the gate says something only at learning rate 0"
            )
        count = sum(row.count for row in rows)
        if count == 0:
            raise ValueError(f"step {len(self.gaps)} has no sampled tokens to compare")
        self._digest = weights_digest
        gap = sum(row.mean * row.count for row in rows) / count
        self.gaps.append(gap)
        first = max(self.gaps[: self._num_first])
        bound = max(first * self._factor, self._floor)
        if len(self.gaps) > self._num_first and not gap <= bound:
            raise DriftError(
                f"step {len(self.gaps) - 1}: the mean gap is {gap:.3g} nats a token, it was "
                f"{first:.3g} in the first {self._num_first} steps, and the weights are the same "
                f"(digest {weights_digest[:12]}): compare its tokens by kv_version, and the digest "
                "with the trainer's"
            )
        return gap
