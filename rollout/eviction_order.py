"""Which cached block is given up next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Protocol


class Block(Protocol):
    """What the order needs to know of a block of the tree."""

    @property
    def block(self) -> int: ...

    @property
    def oldest(self) -> int:
        """The oldest weights that what it holds depends on; never changes."""
        ...

    @property
    def last_used(self) -> int:
        """Never decreases while a block is in the tree."""
        ...


class EvictionOrder:
    """Blocks of weights that are of no use any more first, then the least recently used.

    A block is offered when it becomes free to go, and need not be taken back when it is not any
    more, or is used again: that shows when its turn comes, so nothing is ever looked through. At
    most one entry stands for a block of one age of weights.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        """Oldest weights -> (last used, block), no later than it was really used."""
        self._queued: set[tuple[int, int]] = set()
        """(oldest weights, block) of all entries."""

    def offer(self, block: Block) -> None:
        """From now on it may be given up, until it is in use again."""
        entry = block.oldest, block.block
        if entry not in self._queued:
            self._queued.add(entry)
            heappush(self._heaps.setdefault(block.oldest, []), (block.last_used, block.block))

    def next(self, *, oldest: int, free: Callable[[int], Block | None]) -> int | None:
        """The block to give up; None if there is none. It stays on offer until it is gone.

        `free`: what a block holds, if it may be given up. Weights older than `oldest` are of no
        use any more.
        """
        tops = []
        for age in list(self._heaps):
            top = self._top(age, free)
            if top is None:
                del self._heaps[age]
            else:
                tops.append((age >= oldest, *top))
        return min(tops)[2] if tops else None

    def _top(self, age: int, free: Callable[[int], Block | None]) -> tuple[int, int] | None:
        """The entry of the block of these weights that was used longest ago."""
        heap = self._heaps[age]
        while heap:
            last_used, number = heap[0]
            block = free(number)
            if block is None or block.oldest != age:
                heappop(heap)
                self._queued.remove((age, number))
            elif block.last_used != last_used:
                heapreplace(heap, (block.last_used, number))
            else:
                return heap[0]
        return None
