"""Prefill and decode on different ranks: the same tokens, and only blocks move that are missing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.two_sides import SIZE, TwoSides, check, expected, turn

from interlace.rollout import Rollout, RolloutConfig, load_config
from interlace.rollout.decode_side import DecodeSide
from interlace.rollout.digest import digest
from interlace.rollout.figures import Figures, Records, figures
from interlace.rollout.messages import TurnResult
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.summary import summarise, summary_table
from interlace.rollout.timeline import draw_timeline
from interlace.rollout.trace import read_trace, write_trace
from interlace.rollout.trajectory import Trajectory

# ---- leaders alone


def moved(sides: TwoSides) -> tuple[int, ...]:
    """Blocks sent since the last look, by those who prefill and by those who decode."""
    numbers = tuple(group.num_blocks_sent for group in sides.groups)
    for group in sides.groups:
        group.num_blocks_sent = 0
    return numbers


def test_a_first_turn_moves_its_blocks_once_and_one_way() -> None:
    sides = TwoSides()
    first = turn(0, range(10), 5)
    sides.submit(first)
    (result,) = sides.run()
    check(first, result)
    assert moved(sides) == (3, 0)
    assert (result.cached_tokens, result.prefill_tokens) == (0, 10)


def test_a_later_turn_moves_only_what_the_other_side_lacks() -> None:
    sides = TwoSides()
    first = turn(0, range(10), 9)
    sides.submit(first)
    (result,) = sides.run()
    assert len(result.token_ids) == 9
    context = [*first.token_ids, *result.token_ids, 30, 31, 32, 33]
    moved(sides)
    second = turn(0, context, 3, known=18)
    sides.submit(second)
    (result,) = sides.run()
    check(second, result)
    # Decoded: positions 10 to 17, in blocks 2 to 4. New: 18 to 22, in blocks 4 and 5.
    assert moved(sides) == (2, 3)
    assert (result.cached_tokens, result.prefill_tokens) == (18, 5)
    assert sides.groups[0].scheduler.num_recomputed == 0


def test_those_who_ask_again_for_the_same_move_one_block() -> None:
    sides = TwoSides(num_homes=2)
    sides.submit(turn(0, range(10), 2))
    sides.run()
    assert moved(sides) == (3, 0, 0)
    twin, elsewhere = turn(2, range(10), 2), turn(1, range(10), 2)
    sides.submit(twin)
    (result,) = sides.run()
    check(twin, result)
    assert moved(sides) == (1, 0, 0)
    sides.submit(elsewhere)
    (result,) = sides.run()
    check(elsewhere, result)
    assert moved(sides) == (3, 0, 0)


def test_twins_that_come_together_move_their_common_blocks_once() -> None:
    sides = TwoSides()
    twins = [turn(number, range(14), 2) for number in range(3)]
    for twin in twins:
        sides.submit(twin)
    for result in sides.run():
        check(twins[result.trajectory], result)
    assert moved(sides) == (4 + 1 + 1, 0)


def test_complete_blocks_leave_while_the_next_ones_are_computed() -> None:
    sides = TwoSides(chunk=4)
    sides.submit(turn(0, range(23), 1))
    sent = []
    while sides.step():
        sent.append(sides.groups[0].num_blocks_sent)
    assert sent[-1] == 6
    assert len(set(sent) - {0}) >= 5


def test_a_transfer_has_a_bound_and_what_does_not_fit_goes_with_the_next() -> None:
    sides = TwoSides(most_blocks=2, most_letter_bytes=1, chunk=64)
    turns = [turn(number, range(number, number + 30), 4) for number in range(3)]
    for one in turns:
        sides.submit(one)
    for result in sides.run():
        check(turns[result.trajectory], result)


def test_an_aborted_turn_keeps_its_blocks_until_the_last_word_about_it() -> None:
    sides = TwoSides(chunk=4)
    sides.submit(turn(0, range(40), 3))
    for _ in range(6):
        assert sides.step()
    home = sides.home(0).scheduler
    before = home.blocks.num_available
    assert before < home.blocks.num_blocks
    sides.abort(0)
    sides.step()
    assert home.blocks.num_available == before
    (result,) = sides.run()
    assert (result.finish, result.token_ids) == ("aborted", [])
    assert all(g.scheduler.blocks.num_available == 64 for g in sides.groups)


def test_an_abort_that_comes_too_late_changes_nothing_at_the_other_side() -> None:
    sides = TwoSides()
    sides.submit(turn(0, range(8), 30))
    while not sides.home(0).scheduler._running:
        assert sides.step()
    sides.abort(0)
    (result,) = sides.run()
    assert result.finish == "aborted"
    sides.submit(turn(0, range(8), 2))
    (result,) = sides.run()
    assert result.token_ids == expected(range(8), 2)


def play(seed: int) -> None:
    """Several turns of eight trajectories, some aborted, in pools and transfers of any size."""
    draw = random.Random(seed)
    sides = TwoSides(
        num_homes=draw.choice([1, 2, 3]),
        blocks=(draw.choice([12, 16, 64]), draw.choice([12, 14, 64])),
        chunk=draw.choice([1, 3, 8, 64]),
        most_blocks=draw.choice([1, 3, 64]),
        most_letter_bytes=draw.choice([1, 1 << 20]),
        seed=seed,
    )
    contexts = {number: [5] * draw.choice([1, 6, 9]) for number in range(8)}
    known = dict.fromkeys(contexts, 0)
    for _ in range(4):
        requests = {}
        for number, context in contexts.items():
            context += [draw.randrange(40) for _ in range(draw.choice([0, 1, 4]))]
            request = turn(number, context, draw.choice([1, 3, 6]), known=known[number])
            requests[number] = request
            sides.submit(request)
        sides.results.clear()
        at = {draw.randrange(60): draw.randrange(8) for _ in range(4)}
        nth = 0
        while sides.step():
            nth += 1
            assert nth < 2000
            if nth in at:
                sides.abort(at[nth])
        assert sorted(r.trajectory for r in sides.results) == sorted(requests)
        for result in sides.results:
            check(requests[result.trajectory], result)
            number = result.trajectory
            known[number] += result.experts_shape[0]
            contexts[number] += result.token_ids
    for group in sides.groups:
        assert group.scheduler.blocks.num_available == group.scheduler.blocks.num_blocks


@pytest.mark.parametrize("seed", range(12))
def test_every_turn_ends_with_its_tokens_whatever_happens(seed: int) -> None:
    play(seed)


def unlock_at_once(side: PrefillSide, work: Any, result: TurnResult) -> None:
    send_home(side, work, result)
    side._blocks.tree.unlock(work.delivery.nodes)
    work.delivery.nodes = []


def give_back_at_once(side: DecodeSide, trajectory: int) -> None:
    sequence = side._scheduler.away(trajectory)
    abort(side, trajectory)
    if sequence is not None:
        side._scheduler._holdings.give_back(sequence)


send_home, abort = PrefillSide._send_home, DecodeSide.abort
CARELESS = [
    (PrefillSide, "_send_home", unlock_at_once),
    (DecodeSide, "abort", give_back_at_once),
]


@pytest.mark.parametrize(("side", "method", "careless"), CARELESS, ids=["lock", "abort"])
def test_blocks_that_change_hands_while_they_are_in_a_transfer_are_found(
    side: type, method: str, careless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, method, careless)
    found = 0
    for seed in (0, 5, 6, 36):
        try:
            play(seed)
        except AssertionError:
            found += 1
    assert found > 0


def test_a_small_pool_makes_turns_give_way_and_be_prefilled_again() -> None:
    sides = TwoSides(blocks=(64, 12))
    turns = [turn(number, range(number, number + 6), 30) for number in range(4)]
    for one in turns:
        sides.submit(one)
    results = sides.run(steps=2000)
    assert len(results) == 4
    for result in results:
        check(turns[result.trajectory], result)
    assert sides.home(0).scheduler.num_preemptions > 0
    assert sum(6 + len(result.token_ids) for result in results) > SIZE * 12


# ---- whole rollouts of the tiny model


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


def played(*overrides: str) -> tuple[list[Trajectory], Records]:
    config = tiny(*overrides)
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    return trajectories, rollout.records


@pytest.fixture(scope="module")
def reference() -> str:
    return digest(played("mode=serial", "layout.world=1")[0])


WAYS = {
    "one to one": ("layout.world=2", "scheduler.chunk_tokens=7", "launch.serial_device_slots=1"),
    "one to two": ("layout.world=3", "layout.prefill_ranks=1", "launch.check_each_op=true"),
    "two to one": ("layout.world=3", "layout.prefill_ranks=2", "scheduler.chunk_tokens=16"),
    "two to two": ("layout.world=4", "dispatch.decode=fixed", "launch.serial_device_slots=2"),
    "by heads": ("layout.world=4", "layout.tp=2", "dispatch.prefill=gather"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_digest_whatever_the_ratio(way: str, reference: str) -> None:
    seed = f"launch.interleaving_seed={len(way)}"
    trajectories, records = played("mode=disaggregated", seed, *WAYS[way])
    assert digest(trajectories) == reference
    layout = tiny("mode=disaggregated", *WAYS[way]).layout
    for rank, (_, tickets) in records.items():
        own = {"prefill"} if rank < layout.prefill_ranks else {"decode"}
        assert {ticket.path for ticket in tickets} == own | {"transfer"}
    measured = figures(records)
    assert measured.kv_bytes_moved > 0
    assert (measured.decode_gap_max, measured.prefill_gap_max) == (0, 0)
    assert set(measured.idle_share) == set(range(layout.world))
    sent = {rank: sum(step.kv_bytes for step in steps) for rank, (steps, _) in records.items()}
    assert all(sent.values()), "keys and values go both ways in tasks of several turns"
    told = [number for steps, _ in records.values() for step in steps for number in step.sampled]
    assert len(told) == sum(trajectory.sampled_tokens for trajectory in trajectories)


@pytest.mark.slow
def test_a_job_four_times_the_pool_of_those_who_decode_has_the_same_digest() -> None:
    prompts = [f"prompt number {n}, which is a little longer" for n in range(8)]

    def answered(*overrides: str) -> tuple[str, Figures]:
        with Rollout(tiny("sampling.max_tokens=150", *overrides)) as rollout:
            answers = rollout.generate(prompts)
        return digest(answers), figures(rollout.records)

    roomy, none = answered("layout.world=1")
    scarce, some = answered("mode=disaggregated", "scheduler.num_blocks=5")
    assert roomy == scarce
    assert (none.preemptions, none.recomputed_tokens, none.kv_bytes_moved) == (0, 0, 0)
    assert some.preemptions > 0
    assert some.recomputed_tokens > 0


@pytest.mark.slow
def test_results_say_what_moved_and_that_all_go_in_lock_step(tmp_path: Path) -> None:
    trajectories, records = played("mode=disaggregated")
    measured = figures(records)
    summary = summarise(
        trajectories,
        records,
        mode="disaggregated",
        layout={"world": 2, "dp": 1, "tp": 1, "ep": 1},
        wall_s=1.0,
        cpu_s=1.0,
        exact=True,
        transport={"kind": "local", "why": "a test"},
    )
    assert summary["lock_step"] is True
    assert summary["kv_bytes_moved"] == measured.kv_bytes_moved
    told = "".join(str(cell) for column in summary_table(summary).columns for cell in column.cells)
    assert "lock-step under one exchange" in told
    write_trace(tmp_path / "trace.json", records)
    assert figures(read_trace(tmp_path / "trace.json")) == measured
    draw_timeline(tmp_path / "timeline.png", records, mode="disaggregated")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
