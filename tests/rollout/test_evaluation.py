"""Success rates, pass@k and their intervals."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from interlace.rollout.cli import app
from interlace.rollout.evaluation import bootstrap, evaluate, pass_at_k, wilson
from interlace.rollout.evaluation_figure import draw_evaluation
from interlace.rollout.store import read_trajectories
from interlace.rollout.trajectory import EndReason, Ledger, Source, Trajectory, Turn


def played(
    task: str,
    reward: float,
    *,
    env: str = "maze",
    end: EndReason = EndReason.TERMINATED,
    **info: bool,
) -> Trajectory:
    ledger = Ledger()
    ledger.append_given([1], Source.PROMPT, 0)
    ledger.append_sampled([2], [-0.5], [-0.5], [0], [0], 0)
    turn = Turn(
        reward=reward,
        start=1,
        stop=2,
        finish="stop",
        valid_action=None,
        text="",
        cached_tokens=0,
        prefill_tokens=1,
    )
    return Trajectory.from_ledger(
        ledger,
        trajectory_id=0,
        task_id=task,
        group_id=None,
        env=env,
        seed=0,
        turns=(turn,),
        end_reason=end,
        info=info,
    )


@given(num=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_success(
    num: int, data: st.DataObject
) -> None:
    successes, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    chosen = list(itertools.combinations(range(num), k))
    share = sum(any(one < successes for one in some) for some in chosen) / len(chosen)
    assert pass_at_k(num, successes, k) == pytest.approx(share)


@pytest.mark.parametrize(("num", "successes", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_of_more_than_there_is_is_refused(num: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(num, successes, k)


@given(num=st.integers(1, 200), data=st.data())
def test_the_wilson_interval_is_where_the_score_test_does_not_reject(
    num: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, num))
    estimate = wilson(successes, num)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 0 <= estimate.low <= estimate.rate + 1e-12
    assert estimate.rate - 1e-12 <= estimate.high <= 1
    for end in (estimate.low, estimate.high):
        if 0 < end < 1:
            score = abs(estimate.rate - end) / math.sqrt(end * (1 - end) / num)
            assert score == pytest.approx(1.959963984540054)


def test_the_bootstrap_is_the_same_for_a_seed_and_covers_the_mean() -> None:
    values = [0.0, 0.25, 0.5, 1.0, 1.0]
    estimate = bootstrap(values, seed=3)
    assert estimate == bootstrap(values, seed=3)
    assert estimate.rate == pytest.approx(0.55)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 0 < estimate.low < 0.55 < estimate.high < 1
    alone = bootstrap([0.5], seed=0)
    assert (alone.rate, alone.low, alone.high) == (0.5, None, None)


def test_figures_are_given_per_environment_and_for_all() -> None:
    greedy = [played("a", 1.0), played("b", 0.0), played("s", 0.0, env="shop", success=True)]
    sampled = [played("a", reward) for reward in (1.0, 0.0, 0.0)]
    sampled += [played("b", 0.0)] * 3 + [played("s", 1.0, env="shop", success=False)] * 3
    rows = evaluate(greedy, sampled, seed=0)
    assert list(rows) == ["maze", "shop", "all"]
    assert rows["maze"]["greedy"]["successes"] == 1
    assert list(rows["maze"]["pass_at_k"]) == ["1", "2", "3"]
    rates = [estimate["rate"] for estimate in rows["maze"]["pass_at_k"].values()]
    assert rates == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert rows["shop"]["greedy"]["rate"] == 1.0
    assert rows["shop"]["pass_at_k"]["3"]["rate"] == 0.0
    assert rows["all"]["tasks"] == 3
    assert list(evaluate(greedy[:2], sampled[:6], seed=0)) == ["maze"]


def test_an_environment_error_is_not_solved_whatever_its_rewards() -> None:
    wrong = played("a", 1.0, end=EndReason.ENVIRONMENT_ERROR)
    row = evaluate([wrong], [wrong], seed=0)["maze"]
    assert (row["greedy"]["rate"], row["pass_at_k"]["1"]["rate"]) == (0.0, 0.0)
    assert row["environment_errors"] == 2


@pytest.mark.slow
def test_the_picture_is_drawn_for_one_task_and_for_many(tmp_path: Path) -> None:
    many = [played(f"t{i}", i % 2, env=f"e{i % 3}") for i in range(9)]
    for name, some in (("one", many[:1]), ("many", many)):
        path = tmp_path / f"{name}.png"
        draw_evaluation(path, evaluate(some, some, seed=0), title=name)
        assert path.read_bytes()[:4] == b"\x89PNG"


def evaluation(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", "--preset", "tiny", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.processes
def test_eval_plays_each_task_greedily_once_and_sampled_k_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    few = ["--set", "tasks.0.count=2", "-k", 3, "--out", out]
    for _ in range(2):  # the second replaces the first
        done = evaluation(*few)
        assert done.exit_code == 0, done.output
    figures = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    row = figures["environments"]["frozen_lake"]
    assert (row["tasks"], row["samples_per_task"]) == (2, 3)
    greedy = read_trajectories(out / "greedy" / "trajectories.parquet")
    sampled = read_trajectories(out / "sampled" / "trajectories.parquet")
    assert sorted(one.task_id for one in greedy) == ["frozen_lake-0", "frozen_lake-1"]
    assert len(sampled) == 6
    temperatures = [
        json.loads((out / part / "config.json").read_text())["sampling"]["temperature"]
        for part in ("greedy", "sampled")
    ]
    assert temperatures == [0.0, 1.0]
    assert len({one.token_ids.tobytes() for one in sampled if one.seed == 0}) > 1
    assert (out / "eval.png").read_bytes()[:4] == b"\x89PNG"
    (out / "mine.txt").write_text("mine", encoding="utf-8")
    refused = evaluation(*few)
    assert refused.exit_code == 2
    assert "holds mine.txt" in refused.stderr


def test_equal_samples_are_refused(tmp_path: Path) -> None:
    refused = evaluation("--set", "sampling.temperature=0", "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert "--set sampling.temperature=1" in refused.stderr
