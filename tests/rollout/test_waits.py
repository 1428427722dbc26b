"""Decode's wait, on recorded runs whose times are known."""

from __future__ import annotations

import pytest

from interlace.rollout.waits import decode_waits


def test_a_run_without_decode_has_no_waits(recorded_run):
    assert decode_waits(recorded_run(["(PPP)"])).num == 0


def test_decode_that_goes_first_waits_less_than_behind_a_whole_prefill(recorded_run):
    first = decode_waits(recorded_run(["(DDPPPP)", "DD"], decoding=[1, 1]))
    behind = decode_waits(recorded_run(["(PPPP)", "DD", "DD"], decoding=[1, 1, 1]))
    assert first.num == behind.num == 2 * 2
    assert behind.max_s > first.p50_s
    assert behind.p50_s <= behind.p99_s <= behind.max_s


def test_the_wait_counts_from_when_somebody_begins_to_decode(recorded_run):
    records = recorded_run(["(PPPP)", "DD"], decoding=[0, 1])
    steps, tickets = records[0]
    issued = min(ticket.resumed_at for ticket in tickets if ticket.path == "decode")
    waited = decode_waits({0: (steps, tickets)})
    assert waited.max_s == pytest.approx(issued - steps[1].began_at)
