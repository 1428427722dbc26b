"""What becomes of turns when weights change: leaders alone, over caches made of numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.rollout.cells import STOP, check_age, check_replay, check_truth, turn
from tests.rollout.one_side import OneSide
from tests.rollout.two_sides import TwoSides

from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.content import Content
from interlace.rollout.holdings import Holdings
from interlace.rollout.kv_versions import KVVersions
from interlace.rollout.messages import Held, TurnRequest, UpdateMode
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.prefix_tree import PrefixTree
from interlace.rollout.sequence import Sequence as Turn

LONG = 12
PROMPT = list(range(20, 30))


def free_of_stop(trajectory: int = 0, holds: Sequence[tuple[int, int]] = ()) -> TurnRequest:
    """A turn that samples `LONG` tokens whatever they are."""
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=PROMPT,
        seed=0,
        experts_from=0,
        sampling=SamplingParams(max_tokens=LONG),
        holds=list(holds),
    )


def running(num_sampled: int, **options: Any) -> OneSide:
    """One turn that has sampled so many tokens, all of them agreed but the last."""
    side = OneSide(chunk=64, **options)
    side.random = Shortest()  # type: ignore[assignment]
    side.submit(free_of_stop())
    for _ in range(num_sampled):
        side.step()
    return side


class Shortest(random.Random):
    """Every prefill takes one step."""

    def randint(self, a: int, b: int) -> int:
        return a


# ---- keep


def test_kept_turns_go_on_over_old_keys_and_say_so() -> None:
    side = running(5)
    changed = side.update("keep")
    (result,) = side.run()
    assert (changed.dropped_tokens, changed.aborted) == (0, ())
    assert result.versions == [0] * 5 + [1] * (LONG - 5)
    assert result.kv_versions == [0] * LONG
    assert result.prefill_tokens == len(PROMPT)


def test_what_was_sampled_in_the_step_of_the_update_is_of_the_old_version() -> None:
    side = running(1)
    side.update("keep")
    (result,) = side.run()
    assert result.versions[:2] == [0, 1]


def test_a_prefill_that_has_sampled_nothing_begins_anew() -> None:
    side = OneSide(chunk=4)
    side.submit(free_of_stop())
    side.step()
    assert side.update("keep").dropped_tokens == 4
    (result,) = side.run()
    assert result.versions == result.kv_versions == [1] * LONG
    assert result.prefill_tokens == 4 + len(PROMPT)


def test_new_turns_find_only_what_the_weights_in_use_have_computed() -> None:
    side = running(3)
    side.run()
    side.update("keep")
    side.submit(free_of_stop(1))
    (result,) = side.run()
    assert (result.cached_tokens, result.kv_versions[0]) == (0, 1)
    side.submit(free_of_stop(2))
    (result,) = side.run()
    assert (result.cached_tokens, result.kv_versions[0]) == (len(PROMPT) - 1, 1)


def test_new_turns_may_be_allowed_to_find_older_keys_and_values() -> None:
    side = running(3, reuse="stale")
    side.run()
    side.update("keep")
    side.submit(free_of_stop(1))
    (result,) = side.run()
    assert result.cached_tokens == len(PROMPT) - 1
    assert (result.versions, result.kv_versions) == ([1] * LONG, [0] * LONG)


def test_no_token_attends_to_keys_that_are_older_than_the_bound() -> None:
    side = running(2, max_staleness=1)
    assert side.update("keep").dropped_tokens == 0
    side.step()
    assert side.update("keep").dropped_tokens == len(PROMPT) + 2
    (result,) = side.run()
    assert result.versions == [0, 0, 1, *[2] * (LONG - 3)]
    assert result.kv_versions == [0, 0, 0, *[2] * (LONG - 3)]


def test_the_bound_also_holds_for_what_is_found_in_the_tree() -> None:
    side = running(3, reuse="stale", max_staleness=1)
    side.run()
    side.update("keep")
    side.update("keep")
    side.submit(free_of_stop(1))
    (result,) = side.run()
    assert result.cached_tokens == 0


# ---- retract


def test_retracted_turns_are_computed_again_and_keep_what_they_sampled() -> None:
    plain = running(5)
    (untouched,) = plain.run()
    side = running(5)
    assert side.update("retract").dropped_tokens == len(PROMPT) + 4
    (result,) = side.run()
    assert result.versions == result.kv_versions == [0] * 5 + [1] * (LONG - 5)
    assert result.token_ids[:5] == untouched.token_ids[:5]
    settled = len(PROMPT) + 4
    assert result.experts[:settled] == untouched.experts[:settled], "as sampled"
    assert result.experts != untouched.experts


def test_a_retracted_turn_uses_no_older_keys_whatever_others_may() -> None:
    side = running(5, reuse="stale")
    side.submit(free_of_stop(1))
    side.step()
    side.update("retract")
    for result in side.run():
        assert result.versions == result.kv_versions


def test_an_aborted_turn_that_was_retracted_gives_all_its_experts() -> None:
    side = running(5)
    side.update("retract")
    side.scheduler.abort(0)
    (result,) = side.run()
    assert (len(result.token_ids), result.finish) == (5, "aborted")
    assert result.experts_shape[0] == len(PROMPT) + 4
    check_replay(side.requests[0], result)


def test_experts_of_a_prefill_that_was_dropped_are_not_told() -> None:
    side = OneSide(chunk=4)
    side.submit(free_of_stop())
    side.step()
    side.update("keep")
    (result,) = side.run()
    check_replay(side.requests[0], result)


# ---- abort and same


def test_an_aborting_update_ends_all_turns_with_what_they_have() -> None:
    side = running(5)
    side.scheduler.submit(free_of_stop(1))
    side.requests[1] = free_of_stop(1)
    assert side.update("abort").aborted == (0, 1)
    ended = {result.trajectory: result for result in side.run()}
    assert {result.finish for result in ended.values()} == {"aborted"}
    assert (ended[0].versions, ended[1].versions) == ([0] * 5, [])
    assert ended[0].experts_shape[0] == len(PROMPT) + 4


def test_another_number_for_the_same_weights_disturbs_nobody() -> None:
    plain = running(5)
    (untouched,) = plain.run()
    side = running(5)
    side.submit(free_of_stop(1))
    side.step()
    side.scheduler.propose(rank=0, hashes=())
    assert side.update("same").dropped_tokens == 0
    side.update("same")
    first, second = sorted(side.run(), key=lambda result: result.trajectory)
    assert first.token_ids == second.token_ids == untouched.token_ids
    assert first.versions == first.kv_versions == [0] * 6 + [2] * (LONG - 6)
    assert first.prefill_tokens + second.prefill_tokens == len(PROMPT) + 2
    side.submit(free_of_stop(2))
    (third,) = side.run()
    assert (third.cached_tokens, third.kv_versions) == (len(PROMPT) - 1, [2] * LONG)


# ---- holds


def test_a_held_turn_samples_so_many_tokens_and_no_more() -> None:
    side = OneSide()
    side.submit(free_of_stop(holds=[(4, 1), (6, 3)]))
    assert side.run() == []
    assert side.held == [Held(trajectory=0, version=1)]
    side.update("keep")
    side.run()
    assert side.held == [Held(trajectory=0, version=1), Held(trajectory=0, version=3)]
    side.update("keep")
    assert side.run() == []
    side.update("keep")
    (result,) = side.run()
    assert result.versions == [0] * 4 + [1] * 2 + [3] * (LONG - 6)
    assert len(side.held) == 2


def test_a_turn_that_is_held_at_nothing_does_not_even_prefill() -> None:
    side = OneSide()
    side.submit(free_of_stop(holds=[(0, 2)]))
    assert side.run() == []
    assert side.held == [Held(trajectory=0, version=2)]
    assert not side.scheduler.blocks._leases
    side.update("keep", 2)
    (result,) = side.run()
    assert (result.kv_versions, result.prefill_tokens) == ([2] * LONG, len(PROMPT))


def test_a_turn_that_ends_exactly_at_its_hold_says_so_first() -> None:
    side = OneSide()
    side.submit(free_of_stop(holds=[(LONG, 1), (LONG + 1, 2)]))
    (result,) = side.run()
    assert result.finish == "length"
    assert side.held == [Held(trajectory=0, version=1)]


def test_a_hold_for_a_version_that_is_there_is_none() -> None:
    side = OneSide()
    side.update("keep")
    side.submit(free_of_stop(holds=[(0, 1), (3, 1)]))
    assert len(side.run()) == 1
    assert side.held == []


def test_held_turns_take_no_place_of_others() -> None:
    side = OneSide(running=2)
    for trajectory in range(6):
        side.submit(free_of_stop(trajectory, holds=[(3, 1)]))
    assert side.run() == []
    assert {held.trajectory for held in side.held} == set(range(6))
    side.update("keep")
    results = side.run()
    assert {tuple(result.kv_versions) for result in results} == {(0,) * LONG}


def test_held_turns_give_up_their_blocks_where_nobody_else_could_go_on() -> None:
    side = OneSide(blocks=8, running=8)
    for trajectory in range(6):
        context = [trajectory, *PROMPT]
        side.submit(turn(trajectory, context, 4, holds=[(2, 1)]))
    side.run()
    ended = {result.trajectory for result in side.results}
    assert {held.trajectory for held in side.held} | ended == set(range(6))
    assert side.scheduler.num_preemptions > 0
    side.update("keep")
    assert {result.trajectory for result in side.run()} | ended == set(range(6))


def test_who_gives_way_is_who_can_be_computed_again() -> None:
    side = OneSide(blocks=16, chunk=64)
    side.random = Shortest()  # type: ignore[assignment]
    side.submit(free_of_stop(holds=[(0, 1)]))
    for trajectory in (1, 2):
        side.submit(turn(trajectory, [trajectory, 1, 2, 3], 26))
    for _ in range(6):
        side.step()
    side.update("keep")
    for result in side.run():
        check_replay(side.requests[result.trajectory], result)
    assert side.scheduler.num_preemptions > 0


# ---- pauses


def test_a_paused_group_computes_nothing_until_it_goes_on() -> None:
    plain = running(5)
    (untouched,) = plain.run()
    side = running(5)
    side.submit(free_of_stop(1))
    side.scheduler.pause()
    proposal = side.scheduler.propose(rank=0, hashes=())
    assert (proposal.decode_rows, proposal.waiting_tokens, proposal.idle) == (0, 0, False)
    assert side.run() == []
    side.scheduler.resume()
    assert {tuple(result.token_ids) for result in side.run()} == {tuple(untouched.token_ids)}


def test_a_turn_goes_on_behind_what_it_had_sampled() -> None:
    request = free_of_stop()
    whole = OneSide()
    whole.submit(request)
    (result,) = whole.run()
    rest = OneSide()
    begun = TurnRequest(
        trajectory=0,
        turn=0,
        token_ids=[*PROMPT, *result.token_ids[:5]],
        seed=0,
        experts_from=len(PROMPT) + 4,
        sampling=SamplingParams(max_tokens=LONG - 5),
        num_resumed=5,
    )
    rest.submit(begun)
    (sequence,) = rest.scheduler._everyone()
    assert (sequence.spoken, sequence.generated) == (result.token_ids[:5], [])
    (second,) = rest.run()
    assert second.token_ids == result.token_ids[5:]
    assert second.experts == result.experts[len(PROMPT) + 4 :]


# ---- the tree


def content(tokens: Sequence[int], *weights: int) -> Content:
    return Content(
        tokens=tokens,
        experts=np.zeros((len(tokens), 1, 1), np.uint8),
        weights=[*weights, *weights[-1:] * (len(tokens) - len(weights))],
    )


def cached(blocks: BlockManager, tokens: Sequence[int], *weights: int) -> list[int]:
    lease = blocks.lease(tokens, len(tokens), oldest=weights[0])
    assert lease is not None
    blocks.copies_of(lease)
    table = list(lease.block_table)
    blocks.give_back(lease, content(tokens, *weights))
    blocks.check_integrity()
    return table


def test_the_same_tokens_of_other_weights_are_other_blocks() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    tokens = list(range(8))
    old, new = cached(blocks, tokens, 0), cached(blocks, tokens, 3)
    assert not set(old) & set(new)
    for oldest, found in ((0, new), (3, new)):
        match = blocks.match(tokens, 8, oldest=oldest)
        assert [node.block for node in match.nodes] == found
    assert not blocks.match(tokens, 8, oldest=4).nodes


def test_rows_that_follow_older_ones_are_as_old_as_these() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    tokens = list(range(10))
    cached(blocks, tokens, 1, 1, 1, 2)
    assert blocks.match(tokens, 10, oldest=1).num_tokens(4) == 10
    assert blocks.match(tokens, 10, oldest=2).num_tokens(4) == 0


def test_the_longest_is_found_and_of_these_the_newest() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    long, short = list(range(8)), list(range(4))
    cached(blocks, long, 0)
    cached(blocks, short, 2)
    assert blocks.match(long, 8).num_tokens(4) == 8
    assert blocks.match(short, 4).nodes[0].oldest == 2


def test_what_may_not_be_used_any_more_is_evicted_first() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    cached(blocks, [1, 2, 3, 4], 5)
    cached(blocks, [6, 7, 8, 9], 4)
    blocks.oldest = 5
    assert blocks.lease([30], 1) is not None
    assert blocks.match([1, 2, 3, 4], 4).nodes, "used longer ago, but current"


# ---- whatever happens


def play(side: OneSide | TwoSides, seed: int, mode: UpdateMode) -> None:
    """Three turns of six trajectories while weights change three times in each round: every turn
    is what it would be alone."""
    draw = random.Random(seed)
    contexts = {number: [5] * draw.choice([1, 6, 9]) for number in range(6)}
    known = dict.fromkeys(contexts, 0)
    for _ in range(3):
        requests = {}
        for number, context in contexts.items():
            context += [draw.randrange(40) for _ in range(draw.choice([0, 1, 4]))]
            num = draw.choice([1, 3, 12])
            requests[number] = turn(number, context, num, known=known[number])
        side.results.clear()
        at = {draw.randrange(25) for _ in range(3)}
        waiting, nth, moved = sorted(requests, reverse=True), 0, True
        while waiting or moved:
            if waiting and draw.random() < 0.5:
                side.submit(requests[waiting.pop()])
            moved = side.step()
            nth += 1
            assert nth < 2000
            if nth in at:
                side.update(mode)
        ended = {result.trajectory: result for result in side.results}
        assert sorted(ended) == sorted(requests)
        for number, result in ended.items():
            check_truth(requests[number], result, side.truth)
            check_replay(requests[number], result, retract=mode == "retract")
            assert len(result.token_ids) == requests[number].sampling.max_tokens or (
                result.token_ids[-1] == STOP
            )
            known[number] += result.experts_shape[0]
            contexts[number] += result.token_ids


MODES: tuple[UpdateMode, ...] = ("keep", "retract")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_what_a_turn_is_depends_only_on_the_tokens_at_which_weights_changed(
    seed: int, mode: UpdateMode
) -> None:
    chunk = (1, 3, 8, 64)[seed % 4]
    play(OneSide(blocks=200, chunk=chunk, running=8, seed=seed), seed, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_the_same_where_others_prefill(seed: int, mode: UpdateMode) -> None:
    sides = TwoSides(
        num_homes=seed % 3 + 1,
        blocks=(200, 200),
        chunk=(1, 3, 8, 64)[seed % 4],
        most_blocks=(1, 3, 64)[seed % 3],
        most_letter_bytes=(1, 1 << 20)[seed % 2],
        seed=seed,
    )
    play(sides, seed, mode)


def scarce(seed: int, modes: Sequence[UpdateMode]) -> None:
    """The same in pools that are too small, with aborts, holds and every kind of update."""
    draw = random.Random(seed)
    sides = TwoSides(
        num_homes=draw.choice([1, 2]),
        blocks=(draw.choice([12, 16, 64]), draw.choice([12, 14, 64])),
        chunk=draw.choice([1, 3, 8]),
        most_blocks=draw.choice([1, 3, 64]),
        max_staleness=draw.choice([None, 0, 1]),
        seed=seed,
    )
    requests = {
        number: turn(
            number,
            [5] * draw.choice([1, 6]) + [draw.randrange(40) for _ in range(4)],
            draw.choice([3, 12]),
            holds=draw.choice([(), (), [(0, 1)], [(2, 2)]]),
        )
        for number in range(8)
    }
    for request in requests.values():
        sides.submit(request)
    at = {draw.randrange(60): draw.choice(modes) for _ in range(4)}
    nth = 0
    while len(sides.results) < len(requests):
        sides.step()
        nth += 1
        assert nth < 2000
        if nth in at or nth in (100, 200):
            sides.update(at.get(nth, "keep"))
        if draw.random() < 0.03:
            sides.abort(draw.randrange(8))
    for _ in range(20):
        sides.step()
    assert sorted(result.trajectory for result in sides.results) == sorted(requests)
    for result in sides.results:
        check_truth(requests[result.trajectory], result, sides.truth)
        check_age(result, sides.groups[0].numbers, sides.max_staleness)
    for group in sides.groups:
        assert group.scheduler.blocks.num_available == group.scheduler.blocks.num_blocks


@pytest.mark.parametrize("seed", range(16))
def test_every_turn_ends_with_true_versions_on_both_sides(seed: int) -> None:
    scarce(seed, ("keep", "retract", "abort", "same"))


# ---- every rule is needed


def ignores_versions(tree: PrefixTree, tokens: Any, limit: int, *, oldest: int = 0) -> Any:
    return match(tree, tokens, limit)


def merges_tokens(tree: PrefixTree, parent: Any, content: Content, block: int) -> Any:
    parents = tree._roots.values() if parent is None else [parent]
    same = [c for p in parents for c in p.children or () if c.tokens == content.tokens]
    return (same[0], [block]) if same else insert(tree, parent, content, block)


def drops_nothing(holdings: Holdings, sequence: Turn) -> bool:
    return sequence not in holdings._waiting and is_outdated(holdings, sequence)


def says_new(kv: KVVersions, stamp: int) -> int:
    return kv.version


def forgets_routing(sequence: Turn) -> int:
    num, sequence.num_computed = sequence.num_computed, 0
    sequence.weights.clear()
    return num


def settles_at_once(sequence: Turn, start: int, experts: Any, weights: Any) -> None:
    compute(sequence, start, experts, weights)
    sequence.num_settled = max(sequence.num_settled, sequence.num_computed)


def never_held(sequence: Turn, version: int) -> bool:
    return False


def goes_on(side: PrefillSide, version: int, mode: UpdateMode) -> Any:
    return side._scheduler.updated(version, "same" if mode == "same" else "keep")


match, insert = PrefixTree.match, PrefixTree.insert
is_outdated, compute = Holdings.is_outdated, Turn.compute


def last_gives_way(holdings: Holdings, sequence: Turn) -> tuple[bool, int]:
    return True, sequence.arrival


CARELESS: dict[str, tuple[type, str, Any]] = {
    "a match looks at tokens only": (PrefixTree, "match", ignores_versions),
    "blocks of the same tokens are merged": (PrefixTree, "insert", merges_tokens),
    "a prefill goes on under other weights": (Holdings, "is_outdated", drops_nothing),
    "keys are as new as tokens": (KVVersions, "number", says_new),
    "experts are those computed last": (Turn, "forget", forgets_routing),
    "experts count before a token was sampled": (Turn, "compute", settles_at_once),
    "holds are ignored": (Turn, "is_held", never_held),
    "who prefills goes on": (PrefillSide, "updated", goes_on),
}


def test_who_came_last_may_not_be_able_to_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holdings, "gives_way", last_gives_way)
    with pytest.raises(AssertionError):
        test_who_gives_way_is_who_can_be_computed_again()


@pytest.mark.slow
@pytest.mark.parametrize("name", CARELESS)
def test_without_a_rule_it_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*CARELESS[name])
    found = []
    for seed in range(8):
        for mode in MODES:
            try:
                play(OneSide(blocks=200, chunk=3, running=8, seed=seed), seed, mode)
                play(TwoSides(blocks=(200, 200), chunk=3, seed=seed), seed, mode)
                scarce(seed, MODES)
            except (AssertionError, IndexError, KeyError, ValueError) as error:
                found.append(error)
    assert found
