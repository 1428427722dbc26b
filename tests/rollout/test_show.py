"""`interlace show`, and the words of tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from interlace.rollout.cache import build_model
from interlace.rollout.cli import app
from interlace.rollout.store import read_trajectories
from interlace.rollout.token_text import TokenText, visible
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.trajectory_view import STYLES, TrajectoryView


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    build_model("tiny-qwen3-moe", folder / "models" / "tiny-qwen3-moe")
    return folder


@pytest.fixture(scope="module")
def results(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results") / "out"
    few = ["--set", "tasks.0.count=2", "--set", "tasks.0.group_size=1"]
    command = ["rollout", "--preset", "tiny", *few, "--out", str(out)]
    made = CliRunner(env={"INTERLACE_CACHE": str(cache)}).invoke(app, command)
    assert made.exit_code == 0, made.output
    return out


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(cache))


def words(cache: Path) -> TokenText:
    return TokenText(cache / "models" / "tiny-qwen3-moe")


def show(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def the_error(*arguments: object) -> str:
    result = show(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def first(results: Path) -> Trajectory:
    return min(
        read_trajectories(results / "trajectories.parquet"), key=lambda one: one.trajectory_id
    )


@pytest.mark.slow
def test_without_an_id_every_trajectory_is_a_line(results: Path) -> None:
    shown = show(results)
    assert shown.exit_code == 0, shown.output
    heading, *lines = shown.stdout.splitlines()
    assert heading.split()[:3] == ["id", "task", "environment"]
    one = first(results)
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert lines[0].split()[1:4] == [one.task_id, one.env, str(one.num_turns)]


@pytest.mark.slow
def test_with_an_id_every_token_is_shown_under_its_source(results: Path) -> None:
    shown = show(results, 0)
    assert shown.exit_code == 0, shown.output
    one = first(results)
    lines = [line.partition(" | ") for line in shown.stdout.splitlines()]
    sampled = [text for name, _, text in lines if name.strip() == "sampled"]
    assert sampled == [turn.text for turn in one.turns]
    turns = [text for name, _, text in lines if name.strip() == "turn"]
    assert len(turns) == one.num_turns
    assert f"reward {one.turns[0].reward:.3f}" in turns[0]
    mean = one.logprob[one.spans[0]].mean()
    assert f"log-probability {mean:.3f}" in turns[0]
    assert "<|im_start|>user" in [text for name, _, text in lines if name.strip() == "template"]


@pytest.mark.slow
def test_on_a_terminal_sources_differ_by_colour_and_tokens_by_heat(
    results: Path, cache: Path
) -> None:
    one = first(results)
    coloured = TrajectoryView(one, words(cache)).coloured()
    *_, body = coloured
    turn = one.turns[0]
    start = body.plain.index("assistant\n" + turn.text) + len("assistant\n")
    styles = {str(span.style) for span in body.spans if span.start <= start < span.end}
    assert styles == {"bold green"}
    assert {str(span.style) for span in body.spans} >= set(STYLES.values())
    *_, hot = TrajectoryView(one, words(cache), heat=True).coloured()
    assert any("on #" in str(span.style) for span in hot.spans)
    assert hot.plain == body.plain


@pytest.mark.slow
def test_tokens_in_plain_text_carry_their_log_probability(results: Path) -> None:
    one = first(results)
    shown = show(results, 0, "--tokens")
    at = one.turns[0].start
    assert f"[{one.logprob[at]:.2f}]" in shown.stdout


@pytest.mark.slow
def test_wrong_folders_and_ids_say_what_to_give(results: Path, tmp_path: Path) -> None:
    assert "give the --out folder of a rollout" in the_error(tmp_path / "nowhere")
    assert f"give {results}" in the_error(results.parent)
    assert "there is no trajectory 9 here: ids are 0 to 1" in the_error(results, 9)
    (tmp_path / "trajectories.parquet.partial").write_bytes(b"PAR1")
    assert "has not ended" in the_error(tmp_path)


@pytest.mark.slow
def test_a_tokenizer_that_is_not_there_is_asked_for(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    (copy / "config.json").write_text(json.dumps({"model": {"path": "gone/away"}}))
    assert "give it as --model" in the_error(copy, 0)
    assert show(copy, 0, "--model", "tiny-qwen3-moe").exit_code == 0
    assert "build it with interlace model tiny-mixtral" in the_error(
        copy, 0, "--model", "tiny-mixtral"
    )
    (copy / "config.json").unlink()
    assert "give it as --model" in the_error(copy, 0)
    assert "no tokenizer.json" in the_error(copy, 0, "--model", tmp_path)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_pieces_of_tokens_are_the_text_of_all(cache: Path, text: str) -> None:
    folder = cache / "models" / "tiny-qwen3-moe"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    pieces = TokenText(folder).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == visible(text)


def test_control_characters_never_reach_a_terminal() -> None:
    assert visible("a\x1b[31mb\r\n\tc\x07") == "a\\x1b[31mb\\r\n\tc\\x07"
