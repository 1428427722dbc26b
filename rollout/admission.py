"""Who of those that wait is given a place and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .block_manager import BlockManager
from .sequence import Sequence as Turn
from .waiting import Waiting, Walk

NextBlock = tuple[int, tuple[int, ...]]
"""Index of a block, and the context up to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A turn that other ranks prefill."""

    next_block: NextBlock | None
    """The first block that is computed for it there."""
    weights: int
    """With which they do."""


class Admission:
    """First come, first served, as long as there are places and blocks.

    Once one finds no blocks, those behind it get none either, but whoever has some goes on. A new
    sequence whose next whole block is being computed by an earlier one waits for it.
    """

    def __init__(self, *, blocks: BlockManager, max_running: int, waiting: Waiting) -> None:
        self._blocks, self._max_running, self._waiting = blocks, max_running, waiting
        self.away: dict[Turn, Errand] = {}

    def admitted(self, *, running: int) -> Iterator[tuple[Turn, NextBlock | None]]:
        """Who leaves the queue, one by one; with the next whole block that is to be computed. No
        two share that.

        `running` may sample, and a block is spared for each: it may need one before a chunk has
        returned.
        """
        places = self._max_running - running - len(self.away)
        coming = self._coming
        walk = self._walk(coming)
        for sequence in walk if places > 0 else ():
            next_block = self._next_block(sequence)
            if not self._ensure_lease(sequence, spare=running):
                walk.only_begun = True
                continue
            self._waiting.remove(sequence)
            if next_block is not None:
                coming.add(next_block)
            yield sequence, next_block
            places -= 1
            if not places:
                return

    def num_tokens(self, *, running: int, joining: int, in_flight: int) -> int:
        """Tokens that could be prefilled now; at least the first in the queue truly fits."""
        if not self._waiting:
            return 0
        places = self._max_running - running - joining - in_flight - len(self.away)
        # twice: by then the running ones may have taken what is spared for them now
        spare = 2 * (running + joining)
        walk = self._walk(self._coming)
        tokens = 0
        for sequence in walk if places > 0 else ():
            if sequence.lease is None and not self.can_lease(sequence, spare=spare):
                walk.only_begun = True
                continue
            tokens += sequence.num_uncomputed
            places -= 1
            if not places:
                break
        return tokens

    def is_stuck(self) -> bool:
        """Nobody who waits has begun, and who came first finds no blocks."""
        first = self._waiting.first_new
        if first is None or self._waiting.begun:
            return False
        return not self.can_lease(first, spare=0)

    def can_lease(self, sequence: Turn, *, spare: int) -> bool:
        known = sequence.token_ids
        return self._blocks.can_lease(known, len(known) + 1, spare=spare, oldest=sequence.oldest)

    @property
    def _coming(self) -> set[NextBlock]:
        """Blocks that other ranks compute."""
        blocks = (errand.next_block for errand in self.away.values())
        return {block for block in blocks if block is not None}

    def _walk(self, coming: set[NextBlock]) -> Walk:
        def passes_over(sequence: Turn) -> int:
            block = self._next_block(sequence) if coming else None
            return block[0] + 1 if block in coming and block is not None else 0

        tree = self._blocks.tree
        return self._waiting.walk(passes_over=passes_over, version=lambda: tree.num_removed)

    def _next_block(self, sequence: Turn) -> NextBlock | None:
        """The first whole block that is not cached, or None."""
        context, size = sequence.token_ids, self._blocks.block_size
        match = self._blocks.match(context, len(context) - 1, oldest=sequence.oldest)
        index = len(match.nodes)
        end = (index + 1) * size
        return (index, tuple(context[:end])) if end < len(context) else None

    def _ensure_lease(self, sequence: Turn, *, spare: int) -> bool:
        if sequence.lease is not None:
            return True
        known, oldest = sequence.token_ids, sequence.oldest
        lease = self._blocks.lease(known, len(known) + 1, spare=spare, oldest=oldest)
        if lease is None:
            return False
        sequence.lease = lease
        if sequence.num_prefilled == 0:
            sequence.num_cached = lease.num_cached
        if lease.cached_experts:
            sequence.compute(0, np.concatenate(lease.cached_experts), lease.cached_weights)
        return True
