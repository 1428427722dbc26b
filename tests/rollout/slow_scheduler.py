"""The rules of admission and of the prefix tree, written down as simply as they can be: whoever is
looked for is found by looking through all, every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from interlace.rollout.admission import Admission, NextBlock
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.content import Content
from interlace.rollout.prefix_tree import Match, Node
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Sequence as Turn


def slowed(scheduler: Scheduler) -> Scheduler:
    """The same scheduler by the simple rules; it must not have begun."""
    blocks = scheduler.blocks
    blocks.tree = SlowTree(blocks.block_size)  # type: ignore[assignment]
    away, scheduler._admission = scheduler._admission.away, SlowAdmission(scheduler, blocks)
    scheduler._admission.away = away
    return scheduler


class SlowAdmission(Admission):
    def __init__(self, scheduler: Scheduler, blocks: BlockManager) -> None:
        super().__init__(
            blocks=blocks, max_running=scheduler._max_running, waiting=scheduler._waiting
        )
        self._scheduler = scheduler

    def _wanted(self) -> list[Turn]:
        version = self._scheduler.kv.version
        wanted = (s for s in self._waiting if not s.aborted and not s.is_held(version))
        return sorted(wanted, key=attrgetter("arrival"))

    def admitted(self, *, running: int) -> Iterator[tuple[Turn, NextBlock | None]]:
        places = self._max_running - running - len(self.away)
        coming = self._coming
        short = False
        for sequence in self._wanted():
            if places <= 0:
                break
            key = self._next_block(sequence)
            if sequence.lease is None and (short or key in coming):
                continue
            if not self._ensure_lease(sequence, spare=running):
                short = True
                continue
            self._waiting.remove(sequence)
            if key is not None:
                coming.add(key)
            places -= 1
            yield sequence, key

    def num_tokens(self, *, running: int, joining: int, in_flight: int) -> int:
        places = self._max_running - running - joining - in_flight - len(self.away)
        coming = self._coming
        tokens, short = 0, False
        for sequence in self._wanted():
            if places <= 0:
                break
            if sequence.lease is None:
                if coming and self._next_block(sequence) in coming:
                    continue
                short = short or not self._affords(sequence, 2 * (running + joining))
                if short:
                    continue
            tokens += sequence.num_uncomputed
            places -= 1
        return tokens

    def is_stuck(self) -> bool:
        wanted = self._wanted()
        if not wanted or any(sequence.lease is not None for sequence in wanted):
            return False
        return not self._affords(wanted[0], 0)

    def _affords(self, sequence: Turn, spare: int) -> bool:
        known, oldest = sequence.token_ids, sequence.oldest
        return self._blocks._affordable(known, len(known) + 1, spare, oldest) is not None


class SlowTree:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: list[Node] = []
        """As they came."""
        self._clock = 0
        self._num_inserted = 0

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def num_unlocked(self) -> int:
        return sum(node.users == 0 for node in self.nodes)

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.nodes]

    def _below(self, parent: Node | None) -> list[Node]:
        return [node for node in self.nodes if node.parent is parent]

    def match(self, tokens: Sequence[int], limit: int, *, oldest: int = 0) -> Match:
        ages = sorted({node.oldest for node in self.nodes if node.oldest >= oldest})
        found = [self._match_from(tokens, limit, age) for age in reversed(ages)]
        return max(found, key=lambda m: m.num_tokens(self.block_size), default=Match(nodes=()))

    def _match_from(self, tokens: Sequence[int], limit: int, age: int) -> Match:
        size = self.block_size
        parent: Node | None = None
        nodes: list[Node] = []
        at = 0
        while at + size <= limit:
            key = tuple(tokens[at : at + size])
            below = (c for c in self._below(parent) if c.oldest == age)
            child = next((c for c in below if c.tokens == key), None)
            if child is None:
                break
            nodes.append(child)
            parent, at = child, at + size
        rest = tuple(tokens[at : min(at + size, limit)])
        best, length = None, 0
        for child in self._below(parent):
            if child.oldest == age:
                same = [a == b for a, b in zip(child.tokens, rest, strict=False)]
                common = [*same, False].index(False)
                if common > length:
                    best, length = child, common
        return Match(nodes=tuple(nodes), partial=best, num_partial=length)

    def lock(self, nodes: Sequence[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.users += 1
            node.last_used = self._clock

    def unlock(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.users -= 1

    def touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def insert(self, parent: Node | None, content: Content, block: int) -> tuple[Node, list[int]]:
        key, weights = tuple(content.tokens), tuple(content.weights)
        freed: list[int] = []
        for sibling in self._below(parent):
            num = min(len(sibling.tokens), len(key))
            if (sibling.tokens[:num], sibling.weights[:num]) != (key[:num], weights[:num]):
                continue
            if num == len(key):
                self.touch(sibling)
                return sibling, [block, *freed]
            if sibling.users == 0:
                freed.append(self.take(sibling))
        node = Node(
            tokens=key,
            block=block,
            experts=np.array(content.experts),
            weights=weights,
            oldest=weights[0] if parent is None else parent.oldest,
            parent=parent,
        )
        self.nodes.append(node)
        self.touch(node)
        return node, freed

    def evict(self, *, oldest: int = 0) -> int | None:
        leaves = (node for node in self.nodes if node.users == 0 and not self._below(node))
        node = min(
            leaves,
            key=lambda leaf: (leaf.oldest >= oldest, leaf.last_used, leaf.block),
            default=None,
        )
        return None if node is None else self.take(node)

    def take(self, node: Node) -> int:
        self.nodes.remove(node)
        return node.block
