"""How long messages take on a link that is given a latency and a bandwidth. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

SEGMENT_BYTES = 32 * 1024
"""Larger messages travel in segments of so much, and smaller ones pass between two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """What a link is like."""

    latency_us: float
    gbit: float | None
    """Gigabits per second; None: any number of bytes takes no time."""

    @property
    def latency_ns(self) -> int:
        return round(self.latency_us * 1000)

    def transmission_ns(self, num_bytes: int) -> int:
        """Nanoseconds the wire is busy with so many bytes."""
        return 0 if self.gbit is None else math.ceil(num_bytes * 8 / self.gbit)


class Visible(NamedTuple):
    """When a message is there for its receivers."""

    key: Any
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bulk:
    key: Any
    left: int


class Link:
    """One wire out of a rank. A message is visible at its end on the wire plus the latency.

    Messages of at most a segment go as soon as the wire has finished the segment or small message
    it is busy with, in the order they were posted. Larger ones share what is left, one after the
    other; each small one that passes delays all of their remaining segments by its own time.
    """

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self._free_ns = 0
        self._bulk: list[_Bulk] = []

    def send(self, now_ns: int, num_bytes: int, key: Any) -> list[Visible]:
        """Put a message on the wire; the last answer is when it is visible, the others are earlier
        messages that are now visible later than was answered for them.

        `now_ns` must not go back from one call to the next.
        """
        self._catch_up(now_ns)
        start = max(now_ns, self._free_ns)
        if num_bytes > SEGMENT_BYTES:
            if not self._bulk:
                self._free_ns = start
            self._bulk.append(_Bulk(key=key, left=num_bytes))
            return self._bulk_visible()[-1:]
        self._free_ns = start + self.model.transmission_ns(num_bytes)
        passing = Visible(key, self._free_ns + self.model.latency_ns)
        return [*(self._bulk_visible() if num_bytes else []), passing]

    def _catch_up(self, now_ns: int) -> None:
        """Segments that began before now are on the wire for good."""
        while self._bulk and self._free_ns < now_ns:
            first = self._bulk[0]
            size = min(first.left, SEGMENT_BYTES)
            self._free_ns += self.model.transmission_ns(size)
            if first.left == size:
                self._bulk.pop(0)
            else:
                self._bulk[0] = replace(first, left=first.left - size)

    def _bulk_visible(self) -> list[Visible]:
        """As if nothing else were posted."""
        end, visible = self._free_ns, []
        for bulk in self._bulk:
            full, rest = divmod(bulk.left, SEGMENT_BYTES)
            end += full * self.model.transmission_ns(SEGMENT_BYTES)
            end += self.model.transmission_ns(rest)
            visible.append(Visible(bulk.key, end + self.model.latency_ns))
        return visible
