"""The chunk with which mode chunked completes soonest: a baseline is tuned before it is beaten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 3

Measure = Callable[[int], float | None]
"""Completion in seconds with so many tokens a chunk; None if it cannot be measured."""


@dataclass(slots=True)
class Tuning:
    """What was tried, and the best of it."""

    completion_s: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        tried = self.completion_s
        return min(tried, key=lambda chunk: (tried[chunk], chunk)) if tried else None


def tune(start: int, measure: Measure) -> Tuning:
    """Double the chunk while that helps, up to 8 times `start`; if it never did, halve it.

    One run each: what differs less than runs do is not worth more.
    """
    tuning = Tuning()

    def improves(chunk: int) -> bool:
        best = tuning.best
        seconds = measure(chunk)
        if seconds is None:
            return False
        tuning.completion_s[chunk] = seconds
        return best is None or seconds < tuning.completion_s[best]

    if not improves(start):
        return tuning
    chunk = start
    for _ in range(_MOST_DOUBLINGS):
        chunk *= 2
        if not improves(chunk):
            break
    if tuning.best == start:
        chunk = start
        for _ in range(_MOST_DOUBLINGS):
            chunk //= 2
            if chunk < 1 or not improves(chunk):
                break
    return tuning
