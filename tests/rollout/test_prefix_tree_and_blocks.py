from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.rollout.block_manager import BlockManager, Lease
from interlace.rollout.content import Content

SIZE = 4


def experts(num: int) -> np.ndarray:
    return np.arange(num * 2, dtype=np.uint8).reshape(num, 2, 1)


def content(tokens: list[int], routed: np.ndarray | None = None) -> Content:
    rows = experts(len(tokens)) if routed is None else routed
    return Content(tokens=tokens, experts=rows, weights=[0] * len(tokens))


def turn(blocks: BlockManager, tokens: list[int], more: int = 0) -> Lease:
    lease = blocks.lease(tokens, len(tokens) + more)
    assert lease is not None
    return lease


def finish(blocks: BlockManager, lease: Lease, tokens: list[int]) -> None:
    blocks.give_back(lease, content(tokens))
    blocks.check_integrity()


def test_a_second_turn_finds_all_but_what_is_new() -> None:
    blocks = BlockManager(num_blocks=8, block_size=SIZE)
    first = list(range(10))
    finish(blocks, turn(blocks, first), first)
    lease = turn(blocks, [*first, 90, 91])
    assert lease.num_cached == 10
    assert lease.copies == [], "the tail block changes hands, nothing is copied"
    assert [len(piece) for piece in lease.cached_experts] == [4, 4, 2]


def test_a_context_that_leaves_the_tree_inside_a_block_copies_it() -> None:
    blocks = BlockManager(num_blocks=8, block_size=SIZE)
    first = list(range(10))
    finish(blocks, turn(blocks, first), first)
    lease = turn(blocks, [0, 1, 2, 3, 4, 5, 77, 78])
    assert lease.num_cached == 6
    ((source, target),) = lease.copies
    assert source != target
    assert target == lease.block_table[1]


def test_the_last_token_is_always_left_to_compute() -> None:
    blocks = BlockManager(num_blocks=8, block_size=SIZE)
    first = list(range(8))
    finish(blocks, turn(blocks, first), first)
    assert turn(blocks, first).num_cached == 7


def test_full_blocks_are_shared_while_both_run() -> None:
    blocks = BlockManager(num_blocks=8, block_size=SIZE)
    prompt = list(range(9))
    one = turn(blocks, prompt, more=3)
    blocks.publish(one, content(prompt))
    other = turn(blocks, prompt, more=3)
    assert other.block_table[:2] == one.block_table[:2]
    assert other.block_table[2] != one.block_table[2]
    blocks.check_integrity()


def test_a_context_that_fits_an_empty_pool_fits_an_idle_one() -> None:
    blocks = BlockManager(num_blocks=4, block_size=SIZE)
    first = list(range(13))
    finish(blocks, turn(blocks, first, more=3), first)
    lease = blocks.lease([*range(6), 50, 51, 52, 53, 54, 55, 56], 16)
    assert lease is not None, "the partial match must give way when the pool is full"
    blocks.check_integrity()


def test_blocks_in_use_are_not_evicted() -> None:
    blocks = BlockManager(num_blocks=4, block_size=SIZE)
    one = turn(blocks, list(range(8)))
    blocks.publish(one, content(list(range(8))))
    two = turn(blocks, list(range(50, 58)))
    assert blocks.lease([90], 1) is None
    finish(blocks, one, list(range(8)))
    assert blocks.lease([90], 1) is not None
    assert set(two.block_table).isdisjoint({90})


contexts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=24)


@settings(deadline=None)
@given(contexts=contexts, data=st.data())
def test_every_block_is_in_one_place_and_cached_experts_are_the_right_ones(
    contexts: list[list[int]], data: st.DataObject
) -> None:
    """Blocks are simulated as the token prefixes they hold, so a wrong match shows."""
    blocks = BlockManager(num_blocks=10, block_size=SIZE)
    held: dict[int, list[tuple[int, ...]]] = {}
    open_leases: list[tuple[Lease, list[int]]] = []

    def compute(lease: Lease, tokens: list[int]) -> np.ndarray:
        for source, target in blocks.copies_of(lease):
            held[target] = list(held[source])
        for at in range(lease.num_cached):
            kept = held[lease.block_table[at // SIZE]][at % SIZE]
            assert kept == tuple(tokens[: at + 1]), "KV of another prefix"
        routed = np.array([[[sum(tokens[: i + 1]) % 256]] for i in range(len(tokens))], np.uint8)
        if lease.cached_experts:
            cached = np.concatenate(lease.cached_experts)
            assert (cached == routed[: lease.num_cached]).all()
        for at in range(lease.num_cached, len(tokens)):
            block = held.setdefault(lease.block_table[at // SIZE], [])
            del block[at % SIZE :]
            block.append(tuple(tokens[: at + 1]))
        return routed

    for tokens in contexts:
        if open_leases and data.draw(st.booleans()):
            lease, old = open_leases.pop(data.draw(st.integers(0, len(open_leases) - 1)))
            routed = np.array([[[sum(old[: i + 1]) % 256]] for i in range(len(old))], np.uint8)
            blocks.give_back(lease, content(old, routed))
            blocks.check_integrity()
        asked = blocks.can_lease(tokens, len(tokens) + 2)
        lease_or_none = blocks.lease(tokens, len(tokens) + 2)
        assert asked == (lease_or_none is not None)
        if lease_or_none is not None:
            routed = compute(lease_or_none, tokens)
            if data.draw(st.booleans()):
                blocks.publish(lease_or_none, content(tokens, routed))
            open_leases.append((lease_or_none, tokens))
        blocks.check_integrity()


def test_integrity_names_what_is_wrong() -> None:
    blocks = BlockManager(num_blocks=4, block_size=SIZE)
    lease = turn(blocks, [1, 2])
    lease.block_table.append(lease.block_table[0])
    with pytest.raises(AssertionError, match="do not make up 4"):
        blocks.check_integrity()
