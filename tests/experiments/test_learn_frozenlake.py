"""The learning experiment in small: what it computes, keeps and judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.experiments.lake_episodes import episode
from typer.testing import CliRunner

from interlace.experiments import learn_frozenlake
from interlace.experiments.grpo.gap import Gap
from interlace.experiments.grpo.record import Iteration, Outcome, Plan
from interlace.experiments.grpo.run import check_ends, learn
from interlace.rollout import EndReason, Rollout

SMALL = Plan(seed=3, iterations=3, episodes=8, max_steps=6)


def gap(largest: float = 2e-6) -> Gap:
    return Gap(tokens=7, mean=largest / 4, p99=largest / 2, largest=largest)


def iteration(number: int, success: float, **changes: Any) -> Iteration:
    made = Iteration(
        number=number,
        success=success,
        mean_turns=7.5,
        loss=-0.1 / (number + 3),
        entropy=1.3,
        grad_norm=0.7,
        gap={0: gap()},
        tokens_of_version={number: 20},
        digest=f"d{number}",
        weights=f"w{number}",
        seconds={"rollout": 1.0, "train": 0.5, "update": 0.01, "stall": 0.001},
    )
    return replace(made, **changes)


def outcome(plan: Plan, **changes: Any) -> Outcome:
    curve = [0.01, 0.5, *[0.96] * 6]
    versions = [{n - 1: 5, n: 15} if plan.in_flight and n else {n: 20} for n in range(len(curve))]
    made = Outcome(
        plan=plan,
        mode="multiplexed",
        kind="local",
        iterations=tuple(
            iteration(n, success, tokens_of_version=versions[n]) for n, success in enumerate(curve)
        ),
        positions={1: {5: 3}} if plan.in_flight else {},
        wall_s=100.0,
    )
    return replace(made, **changes)


def outcomes() -> dict[str, Outcome]:
    arms = learn_frozenlake.arms(8, 128)
    return {name: outcome(arm.plan, mode=arm.mode) for name, arm in arms.items()}


def with_iteration(run: Outcome, at: int, **changes: Any) -> Outcome:
    changed = list(run.iterations)
    changed[at] = replace(changed[at], **changes)
    return replace(run, iterations=tuple(changed))


# ---- the record


def test_an_outcome_is_the_same_bits_after_it_was_written(tmp_path: Path) -> None:
    made = outcome(Plan(seed=1, in_flight=True))
    made = with_iteration(made, 2, loss=0.1 + 0.2, gap={0: gap(1 / 3), 1: gap(1e-30)})
    made.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == made
    assert [file.name for file in tmp_path.iterdir()] == ["outcome.json"]


def test_time_does_not_count_and_every_number_does() -> None:
    made = outcome(Plan(seed=1))
    assert made.equals(with_iteration(replace(made, wall_s=7.0, mode="serial"), 1, seconds={}))
    for change in (
        {"loss": made.iterations[1].loss * (1 + 2**-52)},
        {"digest": "other"},
        {"weights": "other"},
        {"gap": {0: gap(2.1e-6)}},
    ):
        assert not made.equals(with_iteration(made, 1, **change)), change
    assert not made.equals(replace(made, iterations=made.iterations[:-1]))


def test_an_episode_that_broke_is_an_error_that_says_why() -> None:
    fair = episode(0, ["up"])
    broken = replace(
        episode(7, ["up"]), end_reason=EndReason.ENVIRONMENT_ERROR, info={"error": "it hung"}
    )
    check_ends([fair])
    with pytest.raises(RuntimeError, match=r"1 of 2 episodes .* trajectory 7, .*: it hung"):
        check_ends([fair, broken])


# ---- the verdict


def failed(runs: Mapping[str, Outcome]) -> list[str]:
    return [bar.wanted for bar in learn_frozenlake.judge(runs) if not bar.holds]


def test_all_bars_hold_for_runs_that_reach_them() -> None:
    assert failed(outcomes()) == []


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [
        ("barrier, seed 1", lambda run: with_iteration(run, 0, success=0.3), "from below 10%"),
        ("barrier, seed 2", lambda run: with_iteration(run, 7, success=0.5), "to 90%"),
        ("in flight, seed 0", lambda run: replace(run, wall_s=601.0), "within 600 s"),
        (
            "barrier, seed 2",
            lambda run: with_iteration(run, 4, gap={0: gap(1.1e-5)}),
            "gap at most 1e-05",
        ),
        (
            "barrier, seed 0, serial",
            lambda run: with_iteration(run, 6, digest="other"),
            "barrier, seed 0 = barrier, seed 0, serial",
        ),
        (
            "in flight, seed 0, replayed",
            lambda run: with_iteration(run, 6, loss=0.0),
            "in flight, seed 0 = in flight, seed 0, replayed",
        ),
    ],
)
def test_a_bar_that_does_not_hold_is_named(name: str, broken: Any, said: str) -> None:
    runs = outcomes()
    runs[name] = broken(runs[name])
    (wanted,) = failed(runs)
    assert said in wanted


def test_updates_that_never_met_a_running_episode_are_not_in_flight() -> None:
    runs = outcomes()
    for name in ("in flight, seed 0", "in flight, seed 0, replayed"):
        calm = [replace(one, tokens_of_version={one.number: 20}) for one in runs[name].iterations]
        runs[name] = replace(runs[name], iterations=tuple(calm))
    (wanted,) = failed(runs)
    assert "while episodes are played" in wanted


# ---- the command


@pytest.mark.slow
def test_runs_that_are_complete_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Plan, str, Any]] = []

    def learnt(plan: Plan, folder: Path, **rest: Any) -> Outcome:
        folder.mkdir(parents=True, exist_ok=True)
        made.append((plan, rest["mode"], rest["positions"]))
        return outcome(plan, mode=rest["mode"])

    monkeypatch.setattr(learn_frozenlake, "learn", learnt)
    app = typer.Typer()
    app.command()(learn_frozenlake.main)
    command = ["--out", str(tmp_path), "--kind", "local", "--iterations", "8"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert [mode for _, mode, _ in made] == ["multiplexed"] * 3 + ["serial"] + ["multiplexed"] * 2
    assert [positions for *_, positions in made] == [None] * 5 + [{1: {5: 3}}]
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert '"holds": true' in (tmp_path / "report.json").read_text()

    made.clear()
    (tmp_path / "barrier-seed-1" / "outcome.json").unlink()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert [plan.seed for plan, *_ in made] == [1]

    made.clear()
    CliRunner().invoke(app, [*command[:-1], "9"])
    assert len(made) == 6, "other runs were asked for"


# ---- runs


@pytest.mark.slow
@pytest.mark.processes
def test_at_a_barrier_the_curve_is_the_same_bits_in_every_mode(tmp_path: Path) -> None:
    told: list[int] = []
    multiplexed = learn(
        SMALL,
        tmp_path / "multiplexed",
        mode="multiplexed",
        kind="local",
        on_iteration=lambda one: told.append(one.number),
    )
    serial = learn(SMALL, tmp_path / "serial", mode="serial", kind="local")
    assert told == [0, 1, 2]
    assert multiplexed.equals(serial)
    assert multiplexed.largest_gap <= 1e-5
    assert len({one.weights for one in multiplexed.iterations}) == 3, "the weights move"
    assert [one.tokens_of_version.keys() for one in multiplexed.iterations] == [{0}, {1}, {2}]
    assert all(one.gap.keys() == {0} for one in multiplexed.iterations)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_keep_their_old_weights_show_in_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_the_number(self: Rollout, source: Any, version: int, **_: Any) -> Any:
        return self.set_version(version)

    monkeypatch.setattr(Rollout, "update_weights", only_the_number)
    plan = replace(SMALL, iterations=2)
    found = learn(plan, tmp_path, mode="multiplexed", kind="local")
    assert found.iterations[0].largest_gap <= 1e-5
    assert found.iterations[1].largest_gap > 1e-3


@pytest.mark.slow
@pytest.mark.processes
def test_in_flight_the_curve_is_the_same_bits_when_updates_are_replayed(tmp_path: Path) -> None:
    plan = replace(SMALL, in_flight=True, episodes=32)
    first = learn(plan, tmp_path / "first", mode="multiplexed", kind="local")
    again = learn(plan, tmp_path / "again", mode="serial", kind="local", positions=first.positions)
    assert first.equals(again)
    assert again.positions == first.positions
    assert set(first.positions) <= {1, 2, 3}
