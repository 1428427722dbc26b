"""The same work for all: Interlace and a fake peer, each in its process, from plan to report."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.peers.test_peer_processes import ENGINE
from typer.testing import CliRunner

from interlace.rollout.cache import build_model
from interlace.rollout.chat import Chat
from interlace.rollout.cli import app
from interlace.rollout.commands.bench import comparison
from interlace.rollout.config import ConfigError
from interlace.rollout.config_file import load_config
from interlace.rollout.peers import interlace_run
from interlace.rollout.peers.contestants import INTERLACE_JOB, parse_arms
from interlace.rollout.peers.interlace_run import play_interlace
from interlace.rollout.peers.played import figures
from interlace.rollout.peers.request import PeersRequest
from interlace.rollout.peers.workload import Shape, max_context, phases

MODEL = "tiny-qwen3-moe"
SMALL = Shape(
    num_trajectories=2,
    num_turns=2,
    num_prompt=40,
    num_appended=24,
    num_generated=4,
    longest_wait_s=0.01,
    batches=(2,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models" / MODEL
    build_model(MODEL, path)
    return path


def test_every_script_has_the_lengths_it_should(folder):
    planned = phases(Shape(), Chat(folder))
    assert [phase.name for phase in planned] == [
        "warm-up",
        *(f"{kind}-{batch}" for batch in (1, 8, 32) for kind in ("prefill", "decode")),
        "rollout",
    ]
    rollout = planned[-1].scripts
    assert len(rollout) == 32
    assert {len(one.prompt) for one in rollout} == {384}
    assert {len(part) for one in rollout for part in one.observations} == {96}
    assert {one.num_turns for one in rollout} == {4}
    assert max_context(planned) == 384 + 3 * 96 + 4 * 48
    waits = [wait for one in rollout for wait in one.waits_s]
    assert 0 <= min(waits) < 0.05
    assert 0.45 < max(waits) <= 0.5


def test_no_two_prompts_are_equal_and_a_seed_draws_others(folder):
    chat = Chat(folder)
    planned = phases(Shape(), chat)
    prompts = [tuple(script.prompt) for phase in planned for script in phase.scripts]
    assert len(set(prompts)) == len(prompts)
    assert phases(Shape(), chat) == planned
    other = phases(Shape(seed=1), chat)
    assert not {tuple(s.prompt) for phase in other for s in phase.scripts} & set(prompts)


def test_lengths_below_the_chat_template_are_refused(folder):
    with pytest.raises(ValueError, match=r"prompts of 10 .* no room for a text"):
        phases(Shape(num_prompt=10), Chat(folder))


@pytest.mark.slow
def test_interlace_is_given_the_tokens_that_others_are_given(folder, monkeypatch):
    planned = phases(SMALL, Chat(folder))
    seen = []
    config = load_config(
        overrides=[*INTERLACE_JOB, f"model.path={folder}", "launch.kind=local", "mode=serial"]
    )

    def noted(trajectories):
        seen.append(sorted(trajectories, key=lambda one: one.trajectory_id))

    monkeypatch.setattr(interlace_run, "_check", noted)
    played = play_interlace(config, planned, tell=lambda phase: None)
    found = figures(SMALL, planned, played)
    assert found["num_tokens"] == 2 * 2 * 4
    assert found["completion_s"] > 0
    assert found["decode_tokens_per_s"]["2"] > 0
    for phase, trajectories in zip(planned, seen, strict=True):
        for script, one in zip(phase.scripts, trajectories, strict=True):
            given = [*script.prompt]
            for number, turn in enumerate(one.turns):
                assert one.token_ids[: turn.start].tolist() == given
                given += one.token_ids[turn.start : turn.stop].tolist()
                given += [*script.observations, []][number]
            assert np.all(np.diff(played[-1].said[0][0].times) >= 0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)  # processes that import torch: seconds, or minutes on a busy machine
def test_a_comparison_is_made_and_told(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("INTERLACE_CACHE", str(folder.parents[1]))
    installed = installed_fake(tmp_path / "installed")
    request = PeersRequest(
        installed=installed, model=MODEL, shape=SMALL, overrides=("launch.kind=local",)
    )
    screen = io.StringIO()
    found = comparison(
        request,
        tmp_path / "out",
        arms=parse_arms(None, ["interlace", "vllm", "transformers"]),
        repeat=1,
        max_load=1000.0,
        console=Console(file=screen, width=140),
    )
    assert found == json.loads((tmp_path / "out" / "peers.json").read_text())
    assert found["absent"] == {"vllm": "it does not know this CPU"}
    assert found["sound"]
    modes = ["interlace-multiplexed", "interlace-serial", "interlace-chunked"]
    assert list(found["arms"]) == [*modes, "transformers"]
    assert found["interlace_gives_one_set_of_tokens"]
    assert found["ratios"]["exact_vs_transformers"]["pairs"] == 1
    assert found["arms"]["interlace-serial"]["equal_tokens"]["equal"] == 16
    assert found["arms"]["transformers"]["version"] == "fake 1"
    assert (tmp_path / "out" / "peers.png").stat().st_size > 10_000
    assert "absent: vllm: it does not know this CPU" in screen.getvalue()

    first = tmp_path / "out" / "runs" / "transformers-0" / "run.json"
    made_at = first.stat().st_mtime_ns
    more = comparison(
        request,
        tmp_path / "out",
        arms=parse_arms("transformers", ["transformers"]),
        repeat=2,
        max_load=1000.0,
        console=Console(file=screen, width=140),
    )
    assert first.stat().st_mtime_ns == made_at
    assert [run["repeat"] for run in more["arms"]["transformers"]["runs"]] == [0, 1]
    assert list(more["arms"]) == ["transformers"]


def installed_fake(folder: Path) -> Path:
    """What `make peers` would leave: vLLM refused, transformers a fake."""
    python = folder / "transformers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {ENGINE} "$@"\n')
    python.chmod(0o755)
    records = {
        "vllm": {"absent": "it does not know this CPU"},
        "transformers": {"version": "fake 1"},
    }
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--peers", "sglang"], "there is no peer 'sglang'"),
        (["--peers", "vllm", "--arms", "llama-cpp"], "there is no arm 'llama-cpp'"),
        (["--set", "layout.worlds=2"], "unknown key layout.worlds"),
        (["--model", "no-such-model"], "there is no folder no-such-model"),
    ],
)
def test_bad_options_are_told_in_one_line(tmp_path, folder, monkeypatch, options, told):
    monkeypatch.setenv("INTERLACE_CACHE", str(folder.parents[1]))
    command = ["bench", "peers", "--model", MODEL, "--out", str(tmp_path / "out"), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert told in done.output
    assert done.output.count("\n") == 1


def test_a_folder_with_other_files_is_refused(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("INTERLACE_CACHE", str(folder.parents[1]))
    (tmp_path / "letter.txt").write_text("dear")
    request = PeersRequest(installed=tmp_path / "none", model=MODEL, shape=SMALL)
    with pytest.raises(ConfigError, match="holds files, and not those of a comparison"):
        comparison(request, tmp_path, arms=[], console=Console(file=io.StringIO()))
