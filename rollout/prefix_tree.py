"""Which keys and values are already there: a tree of KV blocks keyed by the tokens they hold.

A node is one block. Inner nodes are full; a leaf may be partly filled. A context is matched token
by token: whole blocks are shared, and of the block where it leaves the tree a copy serves (the
caller copies it). Nodes in use are locked from the root down; of the others the least recently
used leaf is evicted first. Nodes keep the experts their tokens were routed to, and which weights
computed them: the same tokens computed with other weights are other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .content import Content, Experts


@dataclass(slots=True, eq=False)
class Node:
    """One block of the tree; the root holds none."""

    tokens: tuple[int, ...]
    block: int
    experts: Experts
    """[len(tokens), L, K]"""
    weights: tuple[int, ...]
    """Of each token: first version with the weights that computed its row."""
    oldest: int
    """Of the weights of the whole context up to here: those of its first token."""
    parent: Node | None
    children: dict[int, list[Node]] = field(default_factory=dict)
    """First token -> nodes that begin with it."""
    users: int = 0
    """Sequences that read this block right now."""
    last_used: int = 0

    @property
    def is_leaf(self) -> bool:
        return not self.children


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What of a context is cached."""

    nodes: tuple[Node, ...]
    """Whole blocks, from the start of the context."""
    partial: Node | None = None
    """The node whose first `num_partial` tokens go on where the whole blocks end."""
    num_partial: int = 0

    def num_tokens(self, block_size: int) -> int:
        return len(self.nodes) * block_size + self.num_partial


class PrefixTree:
    """The tree alone: it names blocks, and hands those it gives up back to its owner."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        nothing = np.zeros((0, 0, 0), np.uint8)
        self._root = Node(tokens=(), block=-1, experts=nothing, weights=(), oldest=0, parent=None)
        self._nodes: set[Node] = set()
        self._num_locked = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_unlocked(self) -> int:
        """Blocks that could be evicted. Locks reach up to the root, so every one of them can."""
        return len(self._nodes) - self._num_locked

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self._nodes]

    def match(self, tokens: Sequence[int], limit: int, *, oldest: int = 0) -> Match:
        """The longest cached prefix of ``tokens[:limit]`` computed with no weights older than
        `oldest`; of equally long ones the newest. Changes nothing."""
        starts = self._root.children.get(tokens[0], ()) if tokens else ()
        ages = sorted({node.oldest for node in starts if node.oldest >= oldest})
        found = [self._match_from(tokens, limit, age) for age in reversed(ages)]
        return max(found, key=lambda m: m.num_tokens(self.block_size), default=Match(nodes=()))

    def _match_from(self, tokens: Sequence[int], limit: int, age: int) -> Match:
        """The longest prefix whose oldest weights are these."""
        size = self.block_size
        node, nodes, at = self._root, [], 0

        def below(first: int) -> Iterator[Node]:
            return (child for child in node.children.get(first, ()) if child.oldest == age)

        while at + size <= limit:
            key = tuple(tokens[at : at + size])
            child = next((c for c in below(key[0]) if c.tokens == key), None)
            if child is None:
                break
            nodes.append(child)
            node, at = child, at + size
        rest = tuple(tokens[at : min(at + size, limit)])
        best, length = None, 0
        for child in below(rest[0]) if rest else ():
            common = _common_prefix(child.tokens, rest)
            if common > length:
                best, length = child, common
        return Match(nodes=tuple(nodes), partial=best, num_partial=length)

    def lock(self, nodes: Sequence[Node]) -> None:
        """Keep these from eviction; they must be a chain from the root."""
        self._clock += 1
        for node in nodes:
            self._num_locked += node.users == 0
            node.users += 1
            node.last_used = self._clock

    def unlock(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.users -= 1
            assert node.users >= 0, "unlocked a node nobody uses"
            self._num_locked -= node.users == 0

    def touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def insert(self, parent: Node | None, content: Content, block: int) -> tuple[Node, list[int]]:
        """Add one block below `parent` (None: the root).

        Returns the node that now stands for this content and the blocks nobody needs any more:
        `block` itself if the content was there already, or shorter leaves this one replaces.
        """
        above = parent or self._root
        key, weights = tuple(content.tokens), tuple(content.weights)
        assert 0 < len(key) <= self.block_size
        assert above is self._root or len(above.tokens) == self.block_size
        siblings = above.children.setdefault(key[0], [])
        freed: list[int] = []
        for sibling in list(siblings):
            num = min(len(sibling.tokens), len(key))
            if (sibling.tokens[:num], sibling.weights[:num]) != (key[:num], weights[:num]):
                continue
            if num == len(key):
                self.touch(sibling)
                return sibling, [block, *freed]
            if sibling.users == 0:
                freed.append(self._remove(sibling))
        node = Node(
            tokens=key,
            block=block,
            experts=content.experts,
            weights=weights,
            oldest=weights[0] if above is self._root else above.oldest,
            parent=above,
        )
        above.children.setdefault(key[0], []).append(node)
        self._nodes.add(node)
        self.touch(node)
        return node, freed

    def evict(self, *, oldest: int = 0) -> int | None:
        """Give up a leaf nobody uses; its block, or None if there is none.

        Those come first that are of weights older than `oldest`, then the least recently used."""
        leaves = (node for node in self._nodes if node.users == 0 and node.is_leaf)
        node = min(
            leaves,
            key=lambda leaf: (leaf.oldest >= oldest, leaf.last_used, leaf.block),
            default=None,
        )
        return None if node is None else self._remove(node)

    def take(self, node: Node) -> int:
        """Remove an unlocked leaf whose block the caller goes on writing; no copy is needed."""
        assert node.users == 0
        assert node.is_leaf
        return self._remove(node)

    def _remove(self, node: Node) -> int:
        above = node.parent
        assert above is not None
        siblings = above.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del above.children[node.tokens[0]]
        self._nodes.remove(node)
        return node.block


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
