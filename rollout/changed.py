"""What became of a group's turns when its weights changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """By default nothing did, as for a rank that leads no group."""

    dropped_tokens: int = 0
    """Rows whose keys and values were given up and are to be computed again."""
    aborted: tuple[int, ...] = ()
    """Trajectories whose turn ends as `aborted`, unless the step's last token ends it anyway."""
