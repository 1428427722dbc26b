from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from interlace.rollout.cli import app, main
from interlace.rollout.config import RolloutConfig
from interlace.rollout.store import read_trajectories

FILES = [
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "timeline.png",
    "trace.json",
    "trajectories.parquet",
]
FEW = ["--set", "tasks.0.count=2", "--set", "tasks.0.group_size=1"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(cache))


def interlace(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def the_error(result: Result, code: int = 2) -> str:
    """The one line an error is, without its prefix."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.slow
@pytest.mark.processes
def test_a_rollout_writes_its_results_and_replaces_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = interlace("rollout", "--preset", "tiny", *FEW, "--out", out)
    assert first.exit_code == 0, first.output
    assert sorted(os.listdir(out)) == FILES
    config = RolloutConfig.model_validate_json((out / "config.json").read_text())
    summary = json.loads((out / "summary.json").read_text())
    trajectories = read_trajectories(out / "trajectories.parquet")
    assert len(trajectories) == len(config.expand_tasks()) == summary["trajectories"] == 2
    assert summary["exact"] is True
    for word in ("chunk_tokens=256", "frozen_lake", "trajectories", summary["digest"][:16]):
        assert word in first.stdout

    (out / "trajectories.parquet.partial").write_bytes(b"left by a run that was interrupted")
    serial = interlace("rollout", "--preset", "tiny", *FEW, "--set", "mode=serial", "--out", out)
    assert serial.exit_code == 0, serial.output
    assert sorted(os.listdir(out)) == FILES
    again = json.loads((out / "summary.json").read_text())
    assert (again["mode"], again["digest"]) == ("serial", summary["digest"])


@pytest.mark.slow
@pytest.mark.processes
def test_environment_errors_are_told_and_alone_they_are_a_failure(tmp_path: Path) -> None:
    wrong = ["--set", "tasks.1.env=frozen_lake", "--set", "tasks.1.params.size=5"]
    some = interlace("rollout", "--preset", "tiny", *FEW, *wrong, "--out", tmp_path / "some")
    assert some.exit_code == 0, some.output
    assert "1 of 3 episodes ended in an environment error" in some.stdout
    assert "no standard map of size 5" in some.stdout
    few = ["--set", "tasks.0.params.size=5", *FEW]
    all_of_them = interlace("rollout", "--preset", "tiny", *few, "--out", tmp_path / "all")
    assert "2 of 2 episodes" in the_error(all_of_them, code=1)
    assert sorted(os.listdir(tmp_path / "all")) == FILES


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_ends_a_rollout_with_130_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from interlace.rollout.cli import main; main()"]
    options = ["--preset", "tiny", "--set", "tasks.0.count=1000", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "rollout", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("starting"):
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=45)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("error: interrupted")


def test_a_model_is_built_into_the_cache_or_a_folder(tmp_path: Path, cache: Path) -> None:
    for _ in range(2):
        built = interlace("model", "tiny-qwen3-moe")
        assert built.exit_code == 0, built.output
        where, how = built.stdout.splitlines()
        assert where == f"tiny-qwen3-moe is in {cache}/models/tiny-qwen3-moe"
        assert "--set model.path=tiny-qwen3-moe" in how
    folder = tmp_path / "mine"
    built = interlace("model", "tiny-mixtral", "--seed", 3, "--out", folder)
    assert built.exit_code == 0, built.output
    assert f"--set model.path={folder}" in built.stdout
    assert "exists already" in the_error(interlace("model", "tiny-mixtral", "--out", folder))


def test_options_that_do_not_fit_a_model_say_so(tmp_path: Path) -> None:
    assert "choose one of smollm2-moe" in the_error(interlace("model", "gpt"))
    shaped = interlace("model", "tiny-mixtral", "--slices", 2, "--out", tmp_path / "model")
    assert "--slices belongs to smollm2-moe" in the_error(shaped)
    assert "with --out" in the_error(interlace("model", "smollm2-moe", "--noise", 0.1))


def test_modules_of_the_current_folder_can_be_named_but_hide_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["interlace", "show", "nowhere"])
    with pytest.raises(SystemExit):
        main()
    assert sys.path[-1] == str(tmp_path)


def test_help_lists_the_presets() -> None:
    shown = CliRunner(env={"TERMINAL_WIDTH": "200"}).invoke(app, ["rollout", "--help"])
    assert shown.exit_code == 0
    assert "demo, tiny" in shown.output


def test_a_traceback_is_shown_only_on_request(tmp_path: Path) -> None:
    wrong = ["rollout", "--preset", "tiny", "--set", "seed=x", "--out", tmp_path / "out"]
    assert "seed = 'x' should be a valid integer" in the_error(interlace(*wrong))
    shown = interlace(*wrong, "--traceback")
    assert shown.exit_code == 2
    assert "Traceback (most recent call last)" in shown.stderr
    assert not (tmp_path / "out").exists()
