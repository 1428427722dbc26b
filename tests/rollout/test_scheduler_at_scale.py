"""However many wait: the same decisions as by the simple rules, and not more work for each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.cells import SIZE, turn
from tests.rollout.slow_scheduler import SlowTree, slowed
from tests.rollout.two_alike import (
    Action,
    Played,
    Side,
    drawn_actions,
    drawn_side,
    schedulers,
)

from interlace.rollout.block_manager import BlockManager
from interlace.rollout.content import Content
from interlace.rollout.eviction_order import EvictionOrder
from interlace.rollout.messages import TurnRequest
from interlace.rollout.prefix_tree import PrefixTree
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn
from interlace.rollout.siblings import Siblings
from interlace.rollout.waiting import Waiting, Walk


def both(make: Callable[[], Side], actions: Sequence[Action]) -> tuple[list[Any], list[Any]]:
    fast, slow = make(), make()
    for scheduler in schedulers(slow):
        slowed(scheduler)
    return Played(side=fast).play(actions), Played(side=slow).play(actions)


def check(make: Callable[[], Side], actions: Sequence[Action]) -> None:
    for nth, (told, simple) in enumerate(zip(*both(make, actions), strict=True)):
        assert told == simple, f"{nth}: {told}, by the simple rules {simple}"


def drawn(seed: int) -> tuple[Callable[[], Side], list[Action]]:
    draw = random.Random(seed)
    return drawn_side(draw), drawn_actions(draw, draw.randint(5, 40))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 1 << 40))
def test_every_decision_is_that_of_the_simple_rules(seed: int) -> None:
    check(*drawn(seed))


contents = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=10), st.integers(0, 2), st.booleans()
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None)
@given(contents=contents, oldest=st.integers(0, 2))
def test_the_tree_is_that_of_the_simple_rules(
    contents: list[tuple[list[int], int, bool]], oldest: int
) -> None:
    """What is found, what is freed, what is evicted; nodes are compared by their blocks."""

    def told(tree: Any) -> Iterator[Any]:
        blocks = BlockManager(num_blocks=7, block_size=SIZE)
        blocks.tree = tree
        for nth, (tokens, age, keeps) in enumerate(contents):
            blocks.oldest = oldest if nth > len(contents) // 2 else 0
            lease = blocks.lease(tokens, len(tokens) + 1, oldest=age)
            if lease is None:
                yield blocks.num_available
                continue
            copies = blocks.copies_of(lease)
            weights = [*lease.cached_weights, *[age] * (len(tokens) - lease.num_cached)]
            weights[1:] = np.maximum.accumulate(weights).tolist()[1:]
            yield lease.block_table, lease.num_cached, copies, tree.num_unlocked
            if keeps:
                experts = np.zeros((len(tokens), 1, 1), np.uint8)
                content = Content(tokens=tokens, experts=experts, weights=weights)
                blocks.publish(lease, content)
                blocks.give_back(lease, content)
            else:
                blocks.discard(lease)
            blocks.check_integrity()

    assert list(told(PrefixTree(SIZE))) == list(told(SlowTree(SIZE)))


def last_of_those(siblings: Siblings[Any], tokens: tuple[int, ...]) -> Any:
    found = (siblings._of[held][-1] for held in siblings._beginning_with(tokens))
    return max(found, key=lambda child: child.number)


def first_entry(order: EvictionOrder, age: int, free: Any) -> Any:
    order._heaps[age] = [e for e in order._heaps[age] if free(e[1]) is not None]
    order._queued = {(age, block) for age, heap in order._heaps.items() for _, block in heap}
    return min(order._heaps[age], key=lambda entry: entry[1], default=None)


def as_they_come(waiting: Waiting, kin: Any, depth: int) -> list[Any]:
    kin.key = (kin.key[0], depth, kin.key[2])
    return [kin]


def beside_kin(walk: Walk, kin: Any) -> None:
    """Of a kin only the first is met."""


CARELESS: dict[str, tuple[type, str, Any]] = {
    "the last of several is found": (Siblings, "_first_with", last_of_those),
    "the lowest block goes first": (EvictionOrder, "_top", first_entry),
    "all kin wait, however much they share": (Waiting, "regroup", as_they_come),
    "kin are forgotten": (Walk, "_go_on_with", beside_kin),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CARELESS)
def test_without_a_rule_it_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*CARELESS[name])
    found = []
    for seed in range(60):
        try:
            check(*drawn(seed))
        except (AssertionError, KeyError, ValueError) as error:
            found.append(error)
    assert found


# ---- how much is looked at


def scheduler(*, blocks: int) -> Scheduler:
    return Scheduler(
        blocks=BlockManager(num_blocks=blocks, block_size=SIZE),
        chunk_tokens=16,
        max_running=8,
        max_context=100,
        expert_shape=(1, 1),
        text_of=lambda _: "",
    )


def other(nth: int) -> list[int]:
    return [nth // 7, nth, nth % 11, 3, 1, 2, 3, 4, 5]


def like_all(nth: int) -> list[int]:
    return [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def begins_like_all(nth: int) -> list[int]:
    return [1, 2, 3, 4, nth, 6, 7, 8, 9, 10]


def calls_of_a_step(
    num: int, blocks: int, context: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Of functions that look at one sequence or one node, in the second step of many turns."""
    s = scheduler(blocks=blocks)
    for nth in range(num):
        request: TurnRequest = turn(nth, context(nth), 8)
        s.submit(request)
    calls: Counter[str] = Counter()

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, counting)

    def step() -> None:
        s.propose(rank=0, hashes=())
        s.commit()
        for work in ("decode", "prefill"):
            rows = s.describe_decode() if work == "decode" else s.describe_prefill()
            drawn = [Drawn(token=1, logprob_raw=0, logprob=0, ends_choice=False)]
            experts = np.zeros((rows.num_rows, 1, 1), np.uint8)
            s.take(work, drawn * len(rows.sample_rows), experts, 0)

    with monkeypatch.context() as monkeypatch:
        step()
        for kind, name in (
            (PrefixTree, "match"),
            (Waiting, "turn"),
            (Waiting, "_place"),
            (PrefixTree, "_free"),
        ):
            counted(kind, name)
        step()
    return calls


@pytest.mark.parametrize("blocks", [60, 4000])
@pytest.mark.parametrize("context", [other, like_all, begins_like_all])
def test_a_step_looks_at_no_more_however_many_wait(
    blocks: int, context: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = calls_of_a_step(50, blocks, context, monkeypatch)
    many = calls_of_a_step(1000, blocks, context, monkeypatch)
    assert few == many
    assert few["turn"] > 0


@pytest.mark.parametrize("num_blocks", [64, 2048])
def test_an_eviction_looks_at_one_block(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(num_blocks=num_blocks, block_size=SIZE)
    for nth in range(num_blocks):
        tokens = [nth, nth, nth, nth]
        lease = blocks.lease(tokens, 4)
        assert lease is not None
        blocks.give_back(
            lease,
            Content(tokens=tokens, experts=np.zeros((4, 1, 1), np.uint8), weights=[0] * 4),
        )
    looked: list[int] = []
    free = PrefixTree._free
    monkeypatch.setattr(PrefixTree, "_free", lambda t, b: (looked.append(b), free(t, b))[1])
    lease = blocks.lease([1, 2, 3], 3)
    assert lease is not None
    assert set(looked) == {0}, "the block that was used longest ago"


def test_who_is_held_or_aborted_is_not_met() -> None:
    s = scheduler(blocks=100)
    for nth in range(6):
        s.submit(turn(nth, other(nth), 8, holds=[(0, 1)] if nth % 2 else []))
    s.abort(0)
    assert [
        s.request.trajectory for s in s._waiting.walk(passes_over=lambda _: 0, version=lambda: 0)
    ] == [2, 4]
    s.updated(1, "keep")
    met = s._waiting.walk(passes_over=lambda _: 0, version=lambda: 0)
    assert [s.request.trajectory for s in met] == [1, 2, 3, 4, 5]
    assert [r.trajectory for r in s.commit()] == [0]


def test_who_was_passed_over_is_asked_again_once_something_has_left_the_cache() -> None:
    s = scheduler(blocks=100)
    for nth, context in enumerate((like_all, like_all, other, like_all)):
        s.submit(turn(nth, context(nth), 8))
    left: list[int] = []
    met = []
    walk = s._waiting.walk(
        passes_over=lambda turn: int(turn.token_ids == like_all(0) and not left),
        version=lambda: len(left),
    )
    for sequence in walk:
        met.append(sequence.request.trajectory)
        left.append(1)
    assert met == [2, 3], "the others had their turn before"
