"""Wrong input is one clear line and exit code 2; a wrong environment ends only its own episode."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.rollout.cache import build_model
from interlace.rollout.cli import app
from interlace.rollout.config import Environments, Launch, ModelSection, RolloutConfig, Sampling
from interlace.rollout.rollout import Rollout
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import EndReason, Trajectory

Arguments = list[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_model("tiny-qwen3-moe", folder)
    return folder


def job(text: str | bytes) -> Callable[[Path, Path], Arguments]:
    def arguments(tmp_path: Path, model: Path) -> Arguments:
        file = tmp_path / "job.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [str(file)]

    return arguments


def tiny(*overrides: str) -> Callable[[Path, Path], Arguments]:
    def arguments(tmp_path: Path, model: Path) -> Arguments:
        options = [f"model.path={model}", *overrides]
        return ["--preset", "tiny", *(part for o in options for part in ("--set", o))]

    return arguments


def prompts(name: str, content: str | None, *more: str) -> Callable[[Path, Path], Arguments]:
    def arguments(tmp_path: Path, model: Path) -> Arguments:
        file = tmp_path / name
        if content is not None:
            file.write_text(content)
        table = f'tasks=[{{file="{file}"}}]'
        return tiny(table, *more)(tmp_path, model)

    return arguments


def damaged(change: Callable[[Path], object]) -> Callable[[Path, Path], Arguments]:
    def arguments(tmp_path: Path, model: Path) -> Arguments:
        folder = tmp_path / "damaged"
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)
        return tiny(f"model.path={folder}")(tmp_path, model)

    return arguments


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def misplace(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 96}))


INPUTS: Mapping[str, tuple[Callable[[Path, Path], Arguments], str]] = {
    "no job": (lambda *_: [], "nothing to run: give a job file"),
    "missing job": (lambda *_: ["no.toml"], "there is no job file no.toml"),
    "folder as job": (lambda tmp_path, _: [str(tmp_path)], "cannot read job file"),
    "unknown preset": (lambda *_: ["--preset", "dmo"], "no preset 'dmo': choose one of demo, tiny"),
    "job and preset": (lambda *_: ["a.toml", "--preset", "demo"], "choose one"),
    "bad TOML": (job("[model\npath = 1"), "job.toml is not valid TOML"),
    "binary job": (job(b"\x00\x01seed = 1"), "job.toml is not valid TOML"),
    "latin-1 job": (job(b"# \xe9\n"), "job.toml, line 1: not UTF-8"),
    "unknown key": (job("sede = 1"), "line 1: unknown key sede; did you mean seed?"),
    "negative size": (job("[scheduler]\nnum_blocks = -1"), "line 2: scheduler.num_blocks = -1"),
    "no tasks": (job("seed = 1"), "there are no tasks: add a [[tasks]] section"),
    "zero tasks": (tiny("tasks.0.count=0"), "tasks.0.count = 0 should be greater than or equal"),
    "seed of 80 bits": (tiny(f"seed={1 << 80}"), "should be less than or equal to"),
    "text as number": (tiny("layout.world=two"), "layout.world = 'two' should be a valid integer"),
    "uneven groups": (tiny("layout.world=3", "layout.tp=2"), "tp=2 does not divide world=3"),
    "heads that do not divide": (
        tiny("layout.world=8", "layout.tp=8"),
        "4 key/value heads",
    ),
    "uneven replicas": (
        tiny("mode=replicas", "layout.replicas=3"),
        "layout.replicas=3 of 2 ranks: each has as many ranks as the others",
    ),
    "unknown environment": (tiny("tasks.0.env=frozen_lke"), "no environment 'frozen_lke': choose"),
    "date as parameter": (tiny("tasks.0.params.day=2026-01-01"), "params is not a JSON value"),
    "missing prompts": (prompts("p.jsonl", None), "p.jsonl: no such file"),
    "empty prompts": (prompts("p.jsonl", "\n"), "p.jsonl: holds no tasks"),
    "prompts in CSV": (prompts("p.csv", "prompt\nhi\n"), "read from .jsonl or .parquet"),
    "prompts that break off": (prompts("p.jsonl", '{"prompt": "hi"}\n{"pro'), "line 2: not JSON"),
    "prompts without column": (prompts("p.jsonl", '{"text": "hi"}'), "no column 'prompt'"),
    "prompts not parquet": (prompts("p.parquet", "PAR1"), "not a parquet file"),
    "missing model folder": (tiny("model.path=no/model"), "there is no folder no/model"),
    "folder without model": (
        lambda tmp_path, model: tiny(f"model.path={tmp_path}")(tmp_path, model),
        "has no config.json",
    ),
    "broken config.json": (
        damaged(lambda folder: (folder / "config.json").write_text("{")),
        "config.json: not valid JSON",
    ),
    "truncated safetensors": (damaged(truncate), "model.safetensors: truncated: tensor model."),
    "missing safetensors": (
        damaged(lambda folder: (folder / "model.safetensors").unlink()),
        "neither model.safetensors nor",
    ),
    "weights of another size": (damaged(misplace), "model.safetensors"),
    "missing tokenizer": (
        damaged(lambda folder: (folder / "tokenizer.json").unlink()),
        "no tokenizer.json",
    ),
    "reward function nowhere": (tiny("rewards.reward_fn=no_module:reward"), "no_module"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_bad_input_is_one_clear_line(name: str, tmp_path: Path, model: Path) -> None:
    arguments, message = INPUTS[name]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["rollout", *arguments(tmp_path, model), "--out", str(out)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(out.glob("trajectories*"))


def test_a_folder_with_somebody_elses_files_is_left_alone(tmp_path: Path, model: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "summary.json").write_text("{}")
    for out, message in (
        (tmp_path, "holds notes.txt, not the files of a rollout"),
        (tmp_path / "notes.txt", "cannot write there"),
        (tmp_path / "notes.txt" / "out", "cannot write there"),
    ):
        arguments = tiny()(tmp_path, model)
        result = CliRunner().invoke(app, ["rollout", *arguments, "--out", str(out)])
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "summary.json"]


HOSTILE = "hostile_environments:Hostile"
MISDEEDS: Mapping[str, tuple[EndReason, str]] = {
    "none": (EndReason.TERMINATED, ""),
    "prints_a_gigabyte": (EndReason.TERMINATED, ""),
    "writes_to_descriptors": (EndReason.TERMINATED, ""),
    "reads_stdin": (EndReason.TERMINATED, ""),
    "object_in_info": (EndReason.TERMINATED, ""),
    "observation_over_the_context": (EndReason.MAX_TOKENS, ""),
    "lone_surrogate": (EndReason.ENVIRONMENT_ERROR, "UTF-8"),
    "bytes_observation": (EndReason.ENVIRONMENT_ERROR, "not bytes"),
    "observation_is_none": (EndReason.ENVIRONMENT_ERROR, "not NoneType"),
    "huge_observation": (EndReason.ENVIRONMENT_ERROR, "10000000 bytes"),
    "nan_reward": (EndReason.ENVIRONMENT_ERROR, "finite"),
    "text_reward": (EndReason.ENVIRONMENT_ERROR, "a number"),
    "three_values": (EndReason.ENVIRONMENT_ERROR, "5 values"),
    "constructor_raises": (EndReason.ENVIRONMENT_ERROR, "no such world"),
    "reset_raises": (EndReason.ENVIRONMENT_ERROR, "no such beginning"),
    "reset_returns_text_alone": (EndReason.ENVIRONMENT_ERROR, "2 values"),
    "step_raises": (EndReason.ENVIRONMENT_ERROR, "no such move"),
    "unprintable_error": (EndReason.ENVIRONMENT_ERROR, "Unprintable"),
    "sys_exit": (EndReason.ENVIRONMENT_ERROR, "SystemExit"),
    "keyboard_interrupt": (EndReason.ENVIRONMENT_ERROR, "KeyboardInterrupt"),
    "endless_recursion": (EndReason.ENVIRONMENT_ERROR, "RecursionError"),
    "kills_its_process": (EndReason.ENVIRONMENT_ERROR, "died"),
    "hangs": (EndReason.ENVIRONMENT_ERROR, "hung"),
}


def config(model: Path) -> RolloutConfig:
    return RolloutConfig(
        model=ModelSection(path=str(model)),
        launch=Launch(kind="local"),
        sampling=Sampling(max_tokens=4),
        environments=Environments(num_processes=2, episodes_per_process=12, step_timeout_s=5.0),
    )


@pytest.fixture(scope="module")
def played(model: Path) -> Mapping[str, Trajectory]:
    """Every misdeed once, all in one rollout and side by side."""
    tasks = [Task(HOSTILE, params={"misdeed": name}, task_id=name) for name in MISDEEDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        with Rollout(config(model)) as rollout:
            trajectories = {t.task_id: t for t in rollout.run(tasks)}
    assert rollout.exact
    return trajectories


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_an_environments_misdeed_ends_only_its_own_episode(
    misdeed: str, played: Mapping[str, Trajectory]
) -> None:
    end_reason, message = MISDEEDS[misdeed]
    trajectory = played[misdeed]
    assert trajectory.end_reason is end_reason, trajectory.info
    assert message in trajectory.info.get("error", "")
    if end_reason is EndReason.TERMINATED:
        assert trajectory.num_turns == 3


@pytest.mark.slow
@pytest.mark.processes
def test_tasks_that_cannot_begin_are_recorded_and_others_go_on(model: Path) -> None:
    tasks = [
        Task(prompt="hello", task_id="good"),
        Task(prompt="word " * 2000, task_id="over the context"),
        Task(prompt=[1, 2, 1_000_000], task_id="outside the vocabulary"),
        Task("no_such_module:Environment", task_id="no module"),
        Task("frozen_lake", params={"size": 5}, task_id="wrong parameter"),
    ]
    with Rollout(config(model)) as rollout:
        ended = {t.task_id: (t.end_reason, t.info.get("error", "")) for t in rollout.run(tasks)}
    assert ended.pop("good")[0] in (EndReason.TERMINATED, EndReason.MAX_TOKENS)
    for name, message in {
        "over the context": "the context holds 2048",
        "outside the vocabulary": "token id 1000000 is outside the vocabulary of 320",
        "no module": "no_such_module",
        "wrong parameter": "no standard map of size 5",
    }.items():
        assert ended[name][0] is EndReason.ENVIRONMENT_ERROR
        assert message in ended[name][1]
