"""A device as strict as a GPU: every rank's collectives run in the order they were posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import islice

Entry = Hashable
"""Names one collective of one group: two groups of one role must not share a name."""


class SerialDevice:
    """One queue per rank. A collective runs once it is among the first `slots` unfinished entries
    of EVERY member's queue, whether or not anybody waits for it. gloo forgives ranks that post in
    different orders; this does not, so tests on a CPU are as strict as NCCL."""

    def __init__(self, num_ranks: int, slots: int) -> None:
        self._queues: list[deque[Entry]] = [deque() for _ in range(num_ranks)]
        self._members: dict[Entry, tuple[int, ...]] = {}
        self._slots = slots

    def enqueue(self, rank: int, entry: Entry, members: tuple[int, ...]) -> None:
        self._members[entry] = members
        self._queues[rank].append(entry)
        self._advance([rank])

    def is_done(self, rank: int, entry: Entry) -> bool:
        return entry not in self._queues[rank]

    def _advance(self, moved: list[int]) -> None:
        """`moved`: ranks whose first entries are not those they were."""
        while moved:
            rank = moved.pop()
            for entry in list(islice(self._queues[rank], self._slots)):
                members = self._members[entry]
                if all(entry in islice(self._queues[m], self._slots) for m in members):
                    for member in members:
                        self._queues[member].remove(entry)
                    del self._members[entry]
                    moved += members
