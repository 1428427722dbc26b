"""Owns the KV blocks of one data-parallel group: free, in a sequence's hands, or in the tree.

A block of the tree that nobody reads is as good as free: it is evicted when one is needed, and
those of weights that may not be used any more go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .content import Content, Experts
from .prefix_tree import Match, Node, PrefixTree


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The blocks one sequence holds until it is given back."""

    block_table: list[int]
    """By absolute block index; the first ``len(shared)`` belong to the tree."""
    shared: list[Node]
    """Locked nodes, in order."""
    num_cached: int
    """Leading tokens whose keys and values are there."""
    cached_experts: list[Experts]
    """Their experts, piece by piece."""
    cached_weights: list[int]
    """First version with the weights that computed each of them."""
    copies: list[tuple[int, int]]
    """(from, to): blocks to copy before the first forward pass writes."""
    pinned: Node | None = None
    """Source of a copy, locked until the copy is described."""


class BlockManager:
    """Leases blocks for a context and lets the lease grow with it.

    Every block is in exactly one place; `check_integrity` proves it.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tree = PrefixTree(block_size)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leases: dict[Lease, None] = {}
        self.oldest = 0
        """First version of the oldest weights whose keys and values are given to anybody else."""

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be evicted."""
        return len(self._free) + self.tree.num_unlocked

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], limit: int, *, oldest: int = 0) -> Match:
        """What of ``tokens[:limit]`` is cached and may be used, of weights from `oldest` on."""
        return self.tree.match(tokens, limit, oldest=max(oldest, self.oldest))

    def can_lease(
        self, tokens: Sequence[int], num_tokens: int, *, spare: int = 0, oldest: int = 0
    ) -> bool:
        """Whether `lease` would succeed now."""
        if self.blocks_for(num_tokens) + spare <= self.num_available:
            return True  # whatever is cached: less is never needed without it
        return self._affordable(tokens, num_tokens, spare, oldest) is not None

    def lease(
        self, tokens: Sequence[int], num_tokens: int, *, spare: int = 0, oldest: int = 0
    ) -> Lease | None:
        """Blocks for `num_tokens`, the first of them `tokens`, reusing what is cached, of weights
        from `oldest` on.

        The last of `tokens` is always left to compute. None if that would not leave `spare` blocks
        available; then nothing has changed. A context that fits an empty pool fits an idle one.
        """
        match = self._affordable(tokens, num_tokens, spare, oldest)
        if match is None:
            return None
        tree, shared, partial = self.tree, list(match.nodes), match.partial
        tree.lock(shared)
        table = [node.block for node in shared]
        experts = [node.experts for node in shared]
        weights = [age for node in shared for age in node.weights]
        copies: list[tuple[int, int]] = []
        pinned = None
        if partial is not None:
            experts.append(partial.experts[: match.num_partial])
            weights += partial.weights[: match.num_partial]
            if self._is_taken(match):
                table.append(tree.take(partial))
            else:
                pinned = partial
                tree.lock([partial])
                table.append(self._take_free())
                copies.append((partial.block, table[-1]))
        while len(table) < self.blocks_for(num_tokens):
            table.append(self._take_free())
        lease = Lease(
            block_table=table,
            shared=shared,
            num_cached=match.num_tokens(self.block_size),
            cached_experts=experts,
            cached_weights=weights,
            copies=copies,
            pinned=pinned,
        )
        self._leases[lease] = None
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Extend the lease to `num_tokens`; False, and nothing has changed, if blocks are short."""
        missing = self.blocks_for(num_tokens) - len(lease.block_table)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        lease.block_table.extend(self._take_free() for _ in range(missing))
        return True

    def _affordable(
        self, tokens: Sequence[int], num_tokens: int, spare: int, oldest: int
    ) -> Match | None:
        """The longest match that can be leased; without its partial block if that is too much."""
        match = self.match(tokens, len(tokens) - 1, oldest=oldest)
        needed = self.blocks_for(num_tokens) - len(match.nodes)
        needed += sum(node.users == 0 for node in match.nodes)
        source = match.partial
        copied = source is not None and source.users == 0 and not self._is_taken(match)
        if needed + copied + spare <= self.num_available:
            return match
        if needed + spare <= self.num_available:
            return replace(match, partial=None, num_partial=0)
        return None

    def _is_taken(self, match: Match) -> bool:
        """Whether the partial block itself changes hands: nobody else needs it as it is."""
        node = match.partial
        return (
            node is not None
            and node.users == 0
            and node.is_leaf
            and match.num_partial == len(node.tokens) < self.block_size
        )

    def copies_of(self, lease: Lease) -> list[tuple[int, int]]:
        """The lease's block copies, to be described once, with its first forward pass."""
        copies, lease.copies = lease.copies, []
        if lease.pinned is not None:
            self.tree.unlock([lease.pinned])
            lease.pinned = None
        return copies

    def publish(self, lease: Lease, content: Content) -> None:
        """Let others match the lease's full blocks among `content`, which is all computed."""
        size = self.block_size
        for index in range(len(lease.shared), len(content) // size):
            parent = lease.shared[-1] if lease.shared else None
            part = content.part(index * size, (index + 1) * size)
            node, freed = self.tree.insert(parent, part, lease.block_table[index])
            self._free.extend(freed)
            lease.block_table[index] = node.block
            self.tree.lock([node])
            lease.shared.append(node)

    def give_back(self, lease: Lease, content: Content) -> None:
        """End a lease of which `content` is computed; what can be matched stays in the tree."""
        self.publish(lease, content)
        full = len(lease.shared)
        rest = content.part(full * self.block_size, len(content))
        if len(rest):
            parent = lease.shared[-1] if lease.shared else None
            _, freed = self.tree.insert(parent, rest, lease.block_table[full])
            self._free.extend(freed)
        self._free.extend(lease.block_table[full + bool(len(rest)) :])
        self.copies_of(lease)
        self.tree.unlock(lease.shared)
        del self._leases[lease]

    def discard(self, lease: Lease) -> None:
        """End a lease without keeping anything it computed."""
        self.copies_of(lease)
        self._free.extend(lease.block_table[len(lease.shared) :])
        self.tree.unlock(lease.shared)
        del self._leases[lease]

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers unless every block is in exactly one place."""
        owned = [b for lease in self._leases for b in lease.block_table[len(lease.shared) :]]
        everywhere = sorted(self._free + owned + self.tree.blocks)
        assert everywhere == list(range(self.num_blocks)), (
            f"{len(self._free)} free, {len(owned)} leased and {len(self.tree)} cached blocks "
            f"do not make up {self.num_blocks}: {np.bincount(everywhere).tolist()}"
        )

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        block = self.tree.evict(oldest=self.oldest)
        assert block is not None, "num_available promised a block that is not there"
        return block
