from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from interlace.rollout.digest import digest
from interlace.rollout.summary import summarise, summary_table, write_summary
from interlace.rollout.trajectory import EndReason, Ledger, Source, Trajectory, Turn

LAYOUT = {"world": 2, "dp": 2, "tp": 1, "ep": 2}
WANTED = {
    "trajectories",
    "turns",
    "sampled_tokens",
    "prefill_tokens",
    "cached_tokens",
    "wall_s",
    "cpu_s",
    "tokens_per_s",
    "mode",
    "layout",
    "returns",
    "valid_action_share",
    "idle_share",
    "decode_gap_max",
    "prefill_gap_max",
    "coexisting_steps_share",
    "alternations_per_step",
    "prefills_spanning_steps",
    "preemptions",
    "tickets_per_step",
    "control_bytes_per_step",
    "exact",
    "digest",
    "outside_digest",
}


def trajectory(number: int, *, env: str = "lake", reward: float = 1.0, **changes) -> Trajectory:
    ledger = Ledger()
    ledger.append_given([1, 2], Source.PROMPT, 0)
    ledger.append_sampled([3, 4], [-1.0, -1.0], [-1.0, -1.0], [0, 0], [0, 0], 0)
    ledger.set_experts(0, np.zeros((3, 1, 1), np.uint8))
    turn = Turn(
        reward=reward,
        start=2,
        stop=4,
        finish="stop",
        valid_action=reward > 0,
        text="go",
        cached_tokens=5,
        prefill_tokens=2,
    )
    made = Trajectory.from_ledger(
        ledger,
        trajectory_id=number,
        task_id="t",
        group_id=None,
        env=env,
        seed=0,
        turns=(turn,),
        end_reason=EndReason.TERMINATED,
        info={},
    )
    return replace(made, **changes)


@pytest.fixture
def records(recorded_run):
    return recorded_run(["(PPP)", "DD", "(PDPD)"], decoding=[0, 1, 1])


def summary_of(trajectories, records, **changes):
    facts = {
        "mode": "multiplexed",
        "layout": LAYOUT,
        "wall_s": 2.0,
        "cpu_s": 3.0,
        "exact": True,
        "transport": {"kind": "window", "why": "one host"},
        **changes,
    }
    return summarise(trajectories, records, **facts)


def test_a_summary_holds_every_figure(records):
    rows = [trajectory(0), trajectory(1, reward=-1.0)]
    got = summary_of(rows, records)
    assert set(got) >= WANTED
    assert (got["trajectories"], got["turns"], got["sampled_tokens"]) == (2, 2, 4)
    assert (got["prefill_tokens"], got["cached_tokens"]) == (4, 10)
    assert got["tokens_per_s"] == 2.0
    assert got["returns"] == {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0}
    assert got["valid_action_share"] == 0.5
    assert got["coexisting_steps_share"] == 1 / 3
    assert list(got["idle_share"]) == ["0", "1"]
    assert got["digest"] == digest(rows)
    assert got["layout"] == LAYOUT
    assert got["transport"] == {"kind": "window", "why": "one host"}


def test_environments_and_ends_are_counted_apart(records):
    rows = [
        trajectory(0),
        trajectory(1, reward=0.0, info={"success": True}),
        trajectory(2, info={"success": False}),
        trajectory(3, env="cave", reward=0.0, end_reason=EndReason.TRUNCATED),
    ]
    got = summary_of(rows, records)
    assert list(got["environments"]) == ["cave", "lake"]
    assert got["environments"]["lake"]["success_share"] == 2 / 3
    assert got["environments"]["cave"]["success_share"] == 0.0
    assert got["end_reasons"]["terminated"] == 3
    assert got["end_reasons"]["truncated"] == 1
    assert got["end_reasons"]["aborted"] == 0


def test_a_run_is_exact_only_if_all_of_it_is(records):
    older = np.array([-1, -1, 0, -1], np.int32)
    assert summary_of([trajectory(0)], records)["exact"]
    assert not summary_of([trajectory(0)], records, exact=False)["exact"]
    assert not summary_of([trajectory(0, kv_version=older)], records)["exact"]


def test_a_run_without_results_has_a_summary(records):
    got = summary_of([], records)
    assert got["digest"] is None
    assert got["returns"]["mean"] is None
    assert summary_of([trajectory(0, end_reason=EndReason.ABORTED)], records)["digest"] is None
    json.dumps(got, allow_nan=False)
    summary_table(got)


def test_the_file_is_the_summary_in_order(records, tmp_path):
    got = summary_of([trajectory(0)], records)
    write_summary(tmp_path / "summary.json", got)
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again == got
    assert list(again) == list(got)


def test_the_table_fits_a_terminal(records):
    out = io.StringIO()
    table = summary_table(summary_of([trajectory(0), trajectory(1, env="cave")], records))
    Console(file=out, width=80).print(table)
    text = out.getvalue()
    for expected in (
        "multiplexed",
        "dp 2",
        "33.3%",
        "lake",
        "cave",
        "success 100%",
        "2.0 tokens/s",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 80
