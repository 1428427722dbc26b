"""What a learning run was asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import msgspec

from .gap import Gap
from .learner import Recipe

Positions = Mapping[int, Mapping[int, int]]
"""Version -> trajectory -> tokens it sampled before that version was in use."""
SETTLED = 5
"""So many iterations at the end make the final success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run's numbers are a function of."""

    seed: int
    in_flight: bool = False
    """Episodes of the next iteration begin before the trainer works on this one, and go on while
    weights change under them (`keep`); else nothing runs while the trainer works."""
    iterations: int = 40
    episodes: int = 128
    """Of one iteration; they are one group."""
    max_steps: int = 12
    """Of one episode; the shortest way has 6."""
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration came to."""

    number: int
    success: float
    """Share of its episodes that reached the goal."""
    mean_turns: float
    loss: float
    entropy: float
    grad_norm: float
    gap: dict[int, Gap]
    """KV-version lag -> gap."""
    tokens_of_version: dict[int, int]
    """Sampled tokens by the version of the weights that drew them."""
    digest: str
    """Of all its trajectories."""
    weights: str
    """Digest of what the ranks serve after it."""
    seconds: dict[str, float]
    """rollout: waited for the last episode; gap; train; update; stall: longest of a rank."""

    @property
    def numbers(self) -> Iteration:
        """Everything that must be the same when it is done again."""
        return replace(self, seconds={})

    @property
    def largest_gap(self) -> float:
        return max(gap.largest for gap in self.gap.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is complete."""

    plan: Plan
    mode: str
    kind: str
    """launch.kind of its rollout."""
    iterations: tuple[Iteration, ...]
    positions: dict[int, dict[int, int]]
    """Where in each trajectory the weights changed; empty unless they changed in flight."""
    wall_s: float
    """From before the ranks were started to after they ended."""

    @property
    def final_success(self) -> float:
        return fmean(iteration.success for iteration in self.iterations[-SETTLED:])

    @property
    def largest_gap(self) -> float:
        return max(iteration.largest_gap for iteration in self.iterations)

    def equals(self, other: Outcome) -> bool:
        """Whether everything but the time it took is the same, bit for bit."""
        mine = [iteration.numbers for iteration in self.iterations]
        return mine == [iteration.numbers for iteration in other.iterations]

    def write(self, path: Path) -> None:
        """As JSON; appears complete or not at all."""
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(self))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """ValueError (msgspec's) if the file holds something else."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
