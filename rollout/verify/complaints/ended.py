"""How a test ended, with its fix and without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .complaint import Proof

Outcome = Literal["passed", "failed", "skipped", "hung", "no result"]
"""`hung`: pytest-timeout ended it."""
ENDS = "ends.jsonl"
"""One line for each phase of each test, as it ends: test, phase, outcome, words."""
REACHED = "reached"
"""Is there once the code that stands in for a fix has been called, in whatever process."""
LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One run of one test."""

    outcome: Outcome
    words: str
    """What it failed with, in one line."""
    reached: bool
    """Whether it came to the place where a fix was disabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Both runs of a proof."""

    row: int
    proof: Proof
    fixed: Ended
    disabled: Ended

    @property
    def holds(self) -> bool:
        """The test passes, and fails in the way it should because of what was disabled."""
        lost = self.disabled.outcome == ("hung" if self.proof.hangs else "failed")
        return self.fixed.outcome == "passed" and lost and self.disabled.reached


def read_ends(folder: Path) -> list[Mapping[str, Any]]:
    """The phases that have ended so far; the last line may still be in the writing."""
    try:
        lines = (folder / ENDS).read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ended(folder: Path, test: str) -> Ended:
    """How `test` ended in the run that this folder is of."""
    mine = [end for end in read_ends(folder) if _is(end["test"], test)]
    reached = (folder / REACHED).exists()
    for end in mine:
        if end["outcome"] == "failed":
            hung = end["words"].startswith(_TIMED_OUT)
            return Ended(outcome="hung" if hung else "failed", words=end["words"], reached=reached)
        if end["outcome"] == "skipped":
            return Ended(outcome="skipped", words=end["words"], reached=reached)
    if any(end["phase"] == "call" for end in mine):
        return Ended(outcome="passed", words="", reached=reached)
    return Ended(outcome="no result", words=_last_line(folder), reached=reached)


_TIMED_OUT = "Failed: Timeout"


def _is(found: str, test: str) -> bool:
    """All cases of a test count for it, unless one is named."""
    return found == test or found.startswith(f"{test}[")


def _last_line(folder: Path) -> str:
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    lines: Sequence[str] = [line for line in log.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was said"
