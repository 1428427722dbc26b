"""Runs that are kept: resumed, repeated when disturbed, told apart; and one real ablation."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.rollout.ablation.arms import parse_arms
from interlace.rollout.ablation.bench import Bench, by_turns
from interlace.rollout.ablation.machine_load import decayed, num_runnable
from interlace.rollout.ablation.request import Request
from interlace.rollout.cache import build_model
from interlace.rollout.cli import app
from interlace.rollout.config import ConfigError

REQUEST = Request(workload="game-short")
(SERIAL,) = parse_arms("serial", world=2)
WORKS = "import pathlib, sys; pathlib.Path(sys.argv[1], 'run.json').write_text('{\"digest\": 1}')"
FAILS = "print('all is well'); raise ValueError('not today')"


@dataclass
class Loads:
    """The load of others during one run after another."""

    peaks: list[float]
    begun: int = 0
    others: float = field(default=0.0, init=False)

    def begin(self) -> None:
        self.begun += 1

    def peak(self) -> float:
        return self.peaks[min(self.begun, len(self.peaks)) - 1]


def bench(folder: Path, loads: Loads, program: str = WORKS, request: Request = REQUEST) -> Bench:
    return Bench(
        folder,
        request,
        watch=loads,
        tell=lambda text: None,
        program=(sys.executable, "-S", "-c", program),
    )


def test_arms_take_turns():
    arms = parse_arms("serial,chunked,multiplexed", world=2)
    order = [(number, arm.name) for number, arm in by_turns(arms, 2)]
    names = ["serial", "chunked", "multiplexed"]
    assert order == [(number, name) for number in (0, 1) for name in names]


@pytest.mark.processes
def test_a_run_that_is_there_is_not_made_again(tmp_path):
    loads = Loads([0.5])
    for _ in range(2):
        run = bench(tmp_path, loads).run(SERIAL, 0)
        assert run.counts
        assert run.figures == {"digest": 1}
    assert loads.begun == 1
    bench(tmp_path, loads).run(SERIAL, 1)
    assert loads.begun == 2


@pytest.mark.processes
def test_a_disturbed_run_is_made_once_more_before_it_is_void(tmp_path):
    loads = Loads([8.0, 0.5])
    assert bench(tmp_path / "better", loads).run(SERIAL, 0).counts
    assert loads.begun == 2
    loads = Loads([8.0])
    run = bench(tmp_path / "void", loads).run(SERIAL, 0)
    assert (run.void, run.counts, run.load) == (True, False, 8.0)
    assert run.figures == {"digest": 1}
    assert loads.begun == 2
    assert bench(tmp_path / "void", Loads([0.1])).run(SERIAL, 0).counts


@pytest.mark.processes
def test_a_failed_run_says_why_and_is_tried_again(tmp_path):
    run = bench(tmp_path, Loads([0.5]), FAILS).run(SERIAL, 0)
    assert run.error == "ValueError: not today"
    assert not run.counts
    assert bench(tmp_path, Loads([0.5])).run(SERIAL, 0).counts


def test_a_folder_of_another_request_is_refused(tmp_path):
    bench(tmp_path / "one", Loads([0.5])).prepare()
    bench(tmp_path / "one", Loads([0.5])).prepare()
    other = Request(workload="game-short", scale="full")
    with pytest.raises(ConfigError, match="holds runs with another scale"):
        bench(tmp_path / "one", Loads([0.5]), request=other).prepare()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds files, and not those of a comparison"):
        bench(tmp_path / "two", Loads([0.5])).prepare()


# ---- the load of others


def test_our_own_threads_are_counted_as_the_kernel_counts(tmp_path):
    def process(number: int, parent: int, states: str) -> None:
        folder = tmp_path / str(number)
        for index, state in enumerate(states):
            thread = folder / "task" / str(number * 100 + index)
            thread.mkdir(parents=True)
            (thread / "stat").write_text(f"{thread.name} (a) b) {state} {parent} 1")
        (folder / "stat").write_text(f"{number} (a) b) {states[0]} {parent} 1")

    process(10, 1, "RS")
    process(11, 10, "SD")
    process(12, 11, "RRS")
    process(20, 1, "RRRR")
    (tmp_path / "uptime").write_text("5")
    assert num_runnable(10, tmp_path) == 4
    assert num_runnable(20, tmp_path) == 4


def test_an_average_forgets_within_minutes():
    average = 0.0
    for _ in range(60):
        average = decayed(average, 2, 1.0)
    assert average == pytest.approx(2 * (1 - 0.3679), rel=0.01)
    assert decayed(average, 0, 600) < 0.001


# ---- the whole of it


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)  # three times torch is imported: seconds, or minutes on a busy machine
def test_a_small_ablation_is_made(tmp_path, monkeypatch):
    cache_folder = tmp_path / "cache"
    monkeypatch.setenv("INTERLACE_CACHE", str(cache_folder))
    build_model("tiny-qwen3-moe", cache_folder / "models" / "tiny-qwen3-moe")
    out = tmp_path / "out"
    tiny = "prompts=0.016,members=0.25,turns=0.1,lengths=0.1,seconds=0.01"
    command = ["ablate", "game-short", "--arms", "serial,multiplexed", "--repeat", "1"]
    command += ["--scale", tiny, "--set", "launch.kind=local", "--max-load", "1000"]
    first = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert first.exit_code == 0, first.output
    report = json.loads((out / "report.json").read_text())
    arms = report["arms"]
    assert list(arms) == ["serial", "multiplexed"]
    assert len(report["digests"]) == 1
    assert arms["multiplexed"]["coexisting_steps_share"] > arms["serial"]["coexisting_steps_share"]
    assert arms["serial"]["shares"]["overlap"] == 0 < arms["multiplexed"]["shares"]["overlap"]
    assert all(arm["first_token_s"]["p50"] > 0 for arm in arms.values())
    assert all(arm["between_tokens_s"]["p50"] > 0 for arm in arms.values())
    pictures = ("completion", "shares", "curve", "timeline")
    for name in ("report.html", *(f"{picture}.png" for picture in pictures)):
        assert (out / name).stat().st_size > 5_000
