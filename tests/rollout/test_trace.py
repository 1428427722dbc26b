from __future__ import annotations

import json
import time

import pytest

from interlace.rollout.figures import figures
from interlace.rollout.trace import read_trace, write_trace

STEPS = ["(PPP)", "DDD", "(DPDP", "DPD)", "", "DD"]


def test_the_figures_can_be_recomputed_from_the_trace(recorded_run, tmp_path):
    records = recorded_run(STEPS, num_ranks=3, decoding=[0, 3, 3, 3, 0, 1])
    write_trace(tmp_path / "trace.json", records)
    assert figures(read_trace(tmp_path / "trace.json")) == figures(records)


def test_a_trace_reads_back_what_was_recorded(recorded_run, tmp_path):
    records = recorded_run(STEPS)
    write_trace(tmp_path / "trace.json", records)
    again = read_trace(tmp_path / "trace.json")
    for rank, (steps, tickets) in records.items():
        assert again[rank][0] == steps
        for got, ticket in zip(again[rank][1], tickets, strict=True):
            for name in ("step", "seq", "path", "role", "stage", "comm_seq", "members", "waited_s"):
                assert getattr(got, name) == getattr(ticket, name)
            for name in ("resumed_at", "computed_at", "posted_at", "settled_at"):
                assert getattr(got, name) == pytest.approx(getattr(ticket, name), abs=2e-9)


def test_there_is_a_lane_for_each_path_and_rank(recorded_run, tmp_path):
    write_trace(tmp_path / "trace.json", recorded_run(STEPS))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {
        (event["pid"], event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert lanes == {(rank, name) for rank in (0, 1) for name in ("steps", "prefill", "decode")}


def test_slices_of_a_lane_do_not_overlap(recorded_run, tmp_path):
    write_trace(tmp_path / "trace.json", recorded_run(STEPS))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        lane = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(lane, 0) - 2e-3
        ends[lane] = event["ts"] + event["dur"]


def test_an_arrow_runs_from_the_last_poster_to_every_other_member(recorded_run, tmp_path):
    records = recorded_run(["DD"], num_ranks=3)
    write_trace(tmp_path / "trace.json", records)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2
    for number, start in starts.items():
        assert start["pid"] != ends[number]["pid"]
        assert start["ts"] <= ends[number]["ts"]


@pytest.mark.slow
def test_a_long_run_is_written_in_seconds(recorded_run, tmp_path):
    records = recorded_run(["(PDPDPDPDPD)"] * 2_000, num_ranks=4)
    began = time.perf_counter()
    write_trace(tmp_path / "trace.json", records)
    took = time.perf_counter() - began
    assert sum(len(tickets) for _, tickets in records.values()) == 80_000
    assert took < 10
    assert (tmp_path / "trace.json").stat().st_size < 80_000 * 600


def test_another_json_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"other\.json: not a trace"):
        read_trace(tmp_path / "other.json")


def test_a_run_without_tickets_has_a_trace(recorded_run, tmp_path):
    records = recorded_run(["", ""])
    write_trace(tmp_path / "trace.json", records)
    assert read_trace(tmp_path / "trace.json") == records
