"""What a run is reduced to, and what pairs of runs say; on orders whose times are known."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.rollout.ablation_runs import figures_of, records_of

from interlace.rollout.ablation.gain import gain, mean_share, prefill_share, slow_down
from interlace.rollout.ablation.measures import (
    curve,
    measure,
    num_exchanges,
    rank_shares,
    tail,
    within,
)
from interlace.rollout.ablation.statistics import paired_ratio, ratio_words
from interlace.rollout.latencies import latencies, token_times
from interlace.rollout.rank_time import common_s

# ---- shares of time


def test_the_time_of_a_rank_is_divided_without_rest(recorded_run):
    for order in (["(PPPP)", "DDDD"], ["(PDPDPD", "", "PDPDPD)"], ["MM", "MM"]):
        for own in recorded_run(order).values():
            shares = rank_shares(*own)
            parts = [name for name in shares if name not in ("overlap", "parked")]
            assert sum(shares[name] for name in parts) == pytest.approx(1, abs=0.02)
            assert shares["parked"] <= shares["idle"]


def test_only_paths_that_take_turns_overlap(recorded_run):
    apart = rank_shares(*recorded_run(["(PPPP)", "DDDD"])[0])
    together = rank_shares(*recorded_run(["(PDPDPDPD)"])[0])
    assert apart["overlap"] == 0
    assert together["overlap"] > 0.3
    assert together["idle"] < apart["idle"]


def test_a_step_without_work_is_parked_time(recorded_run):
    shares = rank_shares(*recorded_run(["DD", "", ""])[0])
    assert shares["parked"] == pytest.approx(0.010 / (0.010 + 0.0036), rel=0.2)


def test_common_time_is_that_of_a_slow_count():
    rng = random.Random(3)
    points = sorted(rng.uniform(0, 1) for _ in range(60))
    spans = list(zip(points[::2], points[1::2], strict=True))
    others = [(a, a + rng.uniform(0, 0.2)) for a in (rng.uniform(0, 1) for _ in range(12))]
    grid = np.linspace(0, 1.2, 240_001)
    inside = [
        np.logical_or.reduce([(a <= grid) & (grid < b) for a, b in many])
        for many in (spans, others)
    ]
    assert common_s(spans, others) == pytest.approx((inside[0] & inside[1]).mean() * 1.2, abs=1e-3)
    assert common_s(spans, []) == common_s([], others) == 0


# ---- waits for tokens


def test_a_first_token_counts_from_when_its_turn_was_asked(recorded_run):
    records = records_of(recorded_run, "serial", rounds=2, seed=0)
    decodes = [step.ended_at for step in records[0][0] if step.sampled]
    found = latencies({0: records[0]}, [(0, decodes[0] - 0.25), (0, decodes[2] - 1e-3)])
    assert found.first_token_p50_s == pytest.approx((0.25 + 1e-3) / 2)
    later = [b - a for a, b in ((decodes[0], decodes[1]), (decodes[2], decodes[3]))]
    assert found.between_tokens_p50_s == pytest.approx(np.median(later))


def test_tokens_count_where_they_are_decoded_on(recorded_run):
    records = records_of(recorded_run, "serial", rounds=1, seed=0)
    steps, tickets = records[1]
    prefills = [ticket for ticket in tickets if ticket.path == "prefill"]
    moving = [replace(ticket, path="transfer") for ticket in prefills[:2]]
    given = token_times({0: records[0], 1: (steps, [*prefills, *moving])})
    assert {trajectory for _, trajectory in given} == {0, 1}


def test_a_run_that_asked_nothing_has_no_latencies(recorded_run):
    found = latencies(recorded_run(["(PP)"]), [])
    assert found.first_token_p99_s is None
    assert found.between_tokens_p99_s is None


# ---- a run in two, and its curve


def test_the_tail_begins_when_nine_tenths_of_the_tokens_are_there():
    sampled_at = [float(second) for second in range(1, 101)]
    assert tail(sampled_at, 130.0, 0.0) == {"bulk_s": 91.0, "tail_s": 39.0}
    assert tail([], 5.0, 1.0) == {"bulk_s": 4.0, "tail_s": 0.0}


def test_the_curve_ends_with_everything_done():
    drawn = curve([1.0, 2.0, 3.0], [2.5, 4.0], 0.0)
    assert drawn["tokens"][0] == drawn["trajectories"][0] == 0
    assert drawn["tokens"][-1] == drawn["trajectories"][-1] == 1
    assert drawn["seconds"][-1] == 4.0
    assert drawn["tokens"] == sorted(drawn["tokens"])


def test_a_turnstile_meets_once_more_where_both_paths_run(recorded_run):
    records = recorded_run(["(DPDP", "DP)", "DD"])
    assert num_exchanges(records, "plan") == 3
    assert num_exchanges(records, "turnstile") == 5


def test_what_ranks_do_before_and_after_a_run_is_left_out(recorded_run):
    records = recorded_run(["", "", "(PPPP)", "DDDD", "", ""])
    steps = records[0][0]
    run = within(records, steps[2].began_at, steps[3].ended_at - 1e-6)
    assert [step.step for step in run[0][0]] == [2, 3]
    assert rank_shares(*run[0])["parked"] == 0 < rank_shares(*records[0])["parked"]
    assert len(run[0][1]) == len(records[0][1])
    assert within(records, 1e9, 2e9) is records


def test_a_rank_is_measured_whatever_its_paths(recorded_run):
    for mode in ("chunked", "serial", "multiplexed"):
        records = records_of(recorded_run, mode, rounds=3, seed=1)
        found = measure(records, [(0, 99.0)], [101.0], began_at=99.0)
        shares = found["timeline"]["ranks"]["0"]
        assert all(0 <= value <= 1.05 for share in shares.values() for value in share)
        assert found["control_bytes"] > 0


# ---- pairs


def test_a_ratio_is_that_of_neighbours():
    drifting = [10.0, 20.0, 40.0, 80.0, 160.0]
    ratio = paired_ratio([0.9 * seconds for seconds in drifting], drifting)
    assert ratio is not None
    assert ratio.median == ratio.low == ratio.high == pytest.approx(0.9)
    assert not ratio.holds_one


def test_an_interval_covers_what_pairs_disagree_on():
    ratio = paired_ratio([0.8, 1.3, 1.0, 0.9, 1.1], [1.0] * 5)
    assert ratio is not None
    assert ratio.low < 1 < ratio.high
    assert ratio.holds_one


def test_one_pair_has_no_interval_in_words():
    one = paired_ratio([3.0], [2.0])
    assert one is not None
    assert ratio_words(one.as_json()) == "1.500"


def test_without_pairs_there_is_no_ratio():
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0], [0.0]) is None
    with pytest.raises(ValueError, match="1 runs cannot be paired with 2"):
        paired_ratio([1.0], [1.0, 2.0])


# ---- what could be gained


def phases(**kinds):
    return {
        kind: {"seconds": seconds, "steps": 1.0, **tickets}
        for kind, (seconds, tickets) in kinds.items()
    }


SERIAL = phases(prefill=(30.0, {"prefill": 300}), decode=(70.0, {"decode": 700}))


def test_p_is_prefills_share_of_serials_busy_steps():
    assert prefill_share(SERIAL) == pytest.approx(0.3)
    assert prefill_share(phases(none=(5.0, {}))) is None


def test_s_is_one_where_the_shorter_costs_nothing_and_two_where_nothing_is_won():
    free = phases(both=(70.0, {"prefill": 300, "decode": 700}))
    none = phases(both=(100.0, {"prefill": 300, "decode": 700}))
    assert slow_down(SERIAL, free) == pytest.approx(1)
    assert slow_down(SERIAL, none) == pytest.approx(2)
    assert slow_down(SERIAL, SERIAL) is None
    assert slow_down({}, free) is None


def test_a_bound_is_reached_where_everything_overlaps():
    serial = {"phases": SERIAL, "ranks": {"0": {"idle": 0.4, "parked": 0.1}}}
    other = {"phases": phases(both=(80.0, {"prefill": 300, "decode": 700}))}
    found = gain(serial, other, ratio=0.8)
    assert found.bound == pytest.approx(0.2)
    assert found.won_of_bound == pytest.approx(1)
    assert found.won_of_idle == pytest.approx(0.5)
    assert found.serial_parked == pytest.approx(0.1)


def test_recorded_multiplexing_wins_what_its_bound_allows(recorded_run):
    serial, multiplexed = (
        figures_of(recorded_run, mode, rounds=30) for mode in ("serial", "multiplexed")
    )
    found = gain(serial, multiplexed, ratio=multiplexed["completion_s"] / serial["completion_s"])
    assert found.won_of_bound == pytest.approx(1, abs=0.15)
    assert mean_share(serial, "overlap") == 0
