"""Which keys and values are already there: a tree of KV blocks keyed by the tokens they hold.

A node is one block. Inner nodes are full; a leaf may be partly filled. A context is matched token
by token: whole blocks are shared, and of the block where it leaves the tree a copy serves (the
caller copies it). Nodes in use are locked from the root down; of the others the least recently
used leaf is evicted first. Nodes keep the experts their tokens were routed to, and which weights
computed them: the same tokens computed with other weights are other nodes. There is a root for each
age of weights that a context may begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .content import Content, Experts
from .eviction_order import EvictionOrder
from .siblings import Siblings


@dataclass(slots=True, eq=False)
class Node:
    """One block of the tree; a root holds none."""

    tokens: tuple[int, ...]
    block: int
    experts: Experts
    """[len(tokens), L, K]"""
    weights: tuple[int, ...]
    """Of each token: first version with the weights that computed its row."""
    oldest: int
    """Of the weights of the whole context up to here: those of its first token."""
    parent: Node | None
    number: int = 0
    """Counts the nodes that ever were."""
    children: Siblings[Node] | None = None
    """None: it has none."""
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
        self._roots: dict[int, Node] = {}
        """Oldest weights -> the root of what they have computed."""
        self._nodes: dict[int, Node] = {}
        """By block."""
        self._order = EvictionOrder()
        self._num_locked = 0
        self._clock = 0
        self._num_inserted = 0
        self.num_removed = 0
        """Nodes that have left. As long as it is the same, what is cached is cached."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_unlocked(self) -> int:
        """Blocks that could be evicted. Locks reach up to the root, so every one of them can."""
        return len(self._nodes) - self._num_locked

    @property
    def blocks(self) -> list[int]:
        return list(self._nodes)

    def match(self, tokens: Sequence[int], limit: int, *, oldest: int = 0) -> Match:
        """The longest cached prefix of ``tokens[:limit]`` computed with no weights older than
        `oldest`; of equally long ones the newest. Changes nothing."""
        ages = sorted((age for age in self._roots if age >= oldest), reverse=True)
        found = [self._match_below(self._roots[age], tokens, limit) for age in ages]
        return max(found, key=lambda m: m.num_tokens(self.block_size), default=Match(nodes=()))

    def _match_below(self, root: Node, tokens: Sequence[int], limit: int) -> Match:
        size = self.block_size
        nodes, at, children = [], 0, root.children
        while children is not None and at + size <= limit:
            child = children.holding(tuple(tokens[at : at + size]))
            if child is None:
                break
            nodes.append(child)
            at, children = at + size, child.children
        partial, num_partial = None, 0
        if children is not None and at < limit:
            rest = tuple(tokens[at : min(at + size, limit)])
            partial, num_partial = children.nearest(rest)
        return Match(nodes=tuple(nodes), partial=partial, num_partial=num_partial)

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
            self._offer(node)

    def touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def insert(self, parent: Node | None, content: Content, block: int) -> tuple[Node, list[int]]:
        """Add one block below `parent` (None: the root).

        Returns the node that now stands for this content and the blocks nobody needs any more:
        `block` itself if the content was there already, or shorter leaves this one replaces.
        """
        key, weights = tuple(content.tokens), tuple(content.weights)
        above = parent or self._root(weights[0])
        assert 0 < len(key) <= self.block_size
        assert above.parent is None or len(above.tokens) == self.block_size
        shorter: list[Node] = []
        for sibling in above.children.related(key) if above.children else ():
            num = min(len(sibling.tokens), len(key))
            if sibling.weights[:num] != weights[:num]:
                continue
            if num == len(key):
                self.touch(sibling)
                return sibling, [block, *map(self._remove, shorter)]
            if sibling.users == 0:
                shorter.append(sibling)
        self._num_inserted += 1
        node = Node(
            tokens=key,
            block=block,
            experts=content.experts,
            weights=weights,
            oldest=above.oldest,
            parent=above,
            number=self._num_inserted,
        )
        if above.children is None:
            above.children = Siblings()
        above.children.add(node)
        self._nodes[block] = node
        self.touch(node)
        self._offer(node)
        return node, [self._remove(sibling) for sibling in shorter]

    def evict(self, *, oldest: int = 0) -> int | None:
        """Give up a leaf nobody uses; its block, or None if there is none.

        Those come first that are of weights older than `oldest`, then the least recently used."""
        block = self._order.next(oldest=oldest, free=self._free)
        return None if block is None else self._remove(self._nodes[block])

    def take(self, node: Node) -> int:
        """Remove an unlocked leaf whose block the caller goes on writing; no copy is needed."""
        assert node.users == 0
        assert node.is_leaf
        return self._remove(node)

    def _remove(self, node: Node) -> int:
        above = node.parent
        assert above is not None
        assert above.children is not None
        above.children.remove(node)
        if not above.children:
            above.children = None
            self._offer(above)
        del self._nodes[node.block]
        self.num_removed += 1
        return node.block

    def _offer(self, node: Node) -> None:
        """It may be evicted now, if it may."""
        if node.users == 0 and node.is_leaf:
            if node.parent is None:
                del self._roots[node.oldest]
            else:
                self._order.offer(node)

    def _free(self, block: int) -> Node | None:
        """The node of this block, if it may be evicted."""
        node = self._nodes.get(block)
        return node if node is not None and node.users == 0 and node.is_leaf else None

    def _root(self, age: int) -> Node:
        if age not in self._roots:
            self._roots[age] = Node(
                tokens=(), block=-1, experts=_NOTHING, weights=(), oldest=age, parent=None
            )
        return self._roots[age]


_NOTHING = np.zeros((0, 0, 0), np.uint8)
