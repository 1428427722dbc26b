from __future__ import annotations

from dataclasses import replace

import pytest

from interlace.rollout.figures import figures


def test_a_step_with_tickets_of_both_paths_coexists(recorded_run):
    got = figures(recorded_run(["(PPP)", "DDD", "(PDPDP)", ""]))
    assert got.coexisting_steps_share == 1 / 3


def test_steps_without_tickets_count_for_nothing_but_control_bytes(recorded_run):
    got = figures(recorded_run(["", "(PPP)", ""]))
    assert got.tickets_per_step == 3
    assert got.control_bytes_per_step == 76
    assert got.coexisting_steps_share == 0


def test_the_decode_gap_is_counted_across_steps(recorded_run):
    got = figures(recorded_run(["(DPDPP", "PDPD)"], decoding=[1, 1]))
    assert got.decode_gap_max == 3


def test_serial_decode_waits_through_whole_prefill_steps(recorded_run):
    steps = ["DD", "(PPPP)", "(PPPP)", "DD"]
    assert figures(recorded_run(steps, decoding=[2, 2, 2, 2])).decode_gap_max == 8


def test_prefill_tickets_while_nobody_decodes_are_no_gap(recorded_run):
    steps = ["DD", "(PPPP)", "(PP)", "DD"]
    assert figures(recorded_run(steps, decoding=[2, 0, 2, 2])).decode_gap_max == 2


def test_prefill_tickets_after_the_last_decode_are_no_gap(recorded_run):
    assert figures(recorded_run(["D(PPPP)"], decoding=[1])).decode_gap_max == 0


def test_the_prefill_gap_lies_within_one_prefill(recorded_run):
    got = figures(recorded_run(["(PDDP", "DP)", "DDDDDD", "(PDP)"]))
    assert got.prefill_gap_max == 2


def test_alternations_are_path_changes_inside_steps(recorded_run):
    got = figures(recorded_run(["(PDP", "DDP)", "DD", ""]))
    assert got.alternations_per_step == (2 + 1 + 0) / 3


def test_prefills_that_lie_in_more_than_one_step_are_counted(recorded_run):
    got = figures(recorded_run(["(PDP", "DP)", "(PDP)", "(P", "D", "P)", "(P"]))
    assert got.prefills_spanning_steps == 2


def test_a_dropped_prefill_ends_where_the_next_begins(recorded_run):
    got = figures(recorded_run(["(PD", "DDD", "(DP)"]))
    assert got.prefills_spanning_steps == 0
    assert got.prefill_gap_max == 0


def test_the_idle_share_is_waiting_of_the_whole_time(recorded_run):
    records = recorded_run(["(PPP)", "", "DD"])
    for rank, (steps, _) in records.items():
        total = steps[-1].ended_at - steps[0].began_at
        assert figures(records).idle_share[rank] == sum(s.waited_s for s in steps) / total
    assert 0 < figures(records).idle_share[0] < 1


def test_one_mixed_path_never_coexists(recorded_run):
    got = figures(recorded_run(["MM", "MMMM"], decoding=[1, 1]))
    assert (got.coexisting_steps_share, got.decode_gap_max, got.tickets_per_step) == (0, 0, 3)


def test_ranks_outside_a_path_do_not_change_the_figures(recorded_run):
    records = recorded_run(["(PDPDP)", "DD"])
    expected = figures(records)
    steps, tickets = records[1]
    records[1] = steps, [ticket for ticket in tickets if ticket.path == "decode"]
    assert figures(records) == expected


def test_ranks_that_disagree_about_a_step_are_named(recorded_run):
    records = recorded_run(["(PDP)", "DD"])
    records[1][0][1] = replace(records[1][0][1], decoding=7)
    with pytest.raises(ValueError, match=r"rank 1, step 1: decoding is 7, on rank 0 1"):
        figures(records)


def test_ranks_that_disagree_about_the_order_are_named(recorded_run):
    records = recorded_run(["PD"])
    tickets = records[1][1]
    swapped = {0: 1, 1: 0}
    tickets[:] = [replace(ticket, seq=swapped[ticket.seq]) for ticket in tickets[:2]]
    with pytest.raises(ValueError, match=r"rank 1, ticket \d: path is"):
        figures(records)


def test_a_forgotten_ticket_is_named(recorded_run):
    records = recorded_run(["(PDP)", "DD"])
    del records[1][1][-1]
    with pytest.raises(ValueError, match=r"rank 1, step 1: num_tickets of decode is 2.*are 1"):
        figures(records)


def test_a_rank_that_missed_a_step_is_named(recorded_run):
    records = recorded_run(["DD", "DD"])
    del records[1][0][-1]
    with pytest.raises(ValueError, match="rank 1 recorded 1 steps, rank 0 2"):
        figures(records)


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="no steps"):
        figures({0: ([], [])})
