"""One version that the ranks were told to stage, and what they have said to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from interlace.rollout.messages import Installed, Staged


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """By rank."""

    number: int
    version: int
    staged: dict[int, Staged] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    """The newest part that the rank is done with."""
    installed: dict[int, Installed] = field(default_factory=dict)

    @property
    def refusals(self) -> list[Staged]:
        return [said for _, said in sorted(self.staged.items()) if said.error is not None]
