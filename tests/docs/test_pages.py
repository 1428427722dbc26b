"""What the documentation shows works: quick checks always, every block with `make firstday`."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from click.testing import Result
from tests.docs.pages import PAGES, ROOT, SHELL, Session, blocks, with_tiny_model
from typer.main import get_command
from typer.testing import CliRunner

from interlace.moe.config import ARCHITECTURES
from interlace.rollout.cli import app
from interlace.rollout.config import RolloutConfig

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
STEP_TIMEOUT_S = 300.0


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


@each_page
def test_python_blocks_compile_and_what_is_not_run_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}, line {block.line}", "exec")
        if block.not_run is not None:
            assert len(block.not_run.split()) > 1


@each_page
def test_commands_have_the_options_they_are_shown_with(page: Path) -> None:
    group = get_command(app)
    for block in blocks(page):
        for command in block.commands:
            name, *rest = shlex.split(command)[1:]
            assert name in group.commands, command  # type: ignore[attr-defined]
            with group.commands[name].make_context(name, rest):  # type: ignore[attr-defined]
                pass


def test_a_command_is_tried_with_a_tiny_model() -> None:
    assert with_tiny_model("interlace model smollm2-moe") == ["model", "tiny-qwen3-moe"]
    tried = with_tiny_model("interlace rollout --preset demo --out out/x")
    assert tried[:3] == ["rollout", "--preset", "tiny"]
    assert "model.path=tiny-qwen3-moe" in tried


def test_every_architecture_and_mode_is_on_its_page() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for architecture in ARCHITECTURES:
        assert f"| `{architecture}` |" in models, architecture
    modes = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
    (field,) = [info for name, info in RolloutConfig.model_fields.items() if name == "mode"]
    for mode in field.annotation.__args__:  # type: ignore[union-attr]
        assert re.search(rf"^\| `{mode}` \|.*\| (?!planned)", modes, flags=re.MULTILINE), mode


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
@pytest.mark.processes
def test_a_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the quickstart, in one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path / "cache"))
    local = ["--set", "launch.kind=local"]
    for command in (
        "interlace init job.toml",
        "interlace rollout job.toml --out out/first",
        "interlace show out/first",
        "interlace show out/first 0 --tokens",
        "interlace eval job.toml -k 2 --out out/eval",
        "interlace show out/eval/sampled",
    ):
        words = with_tiny_model(command)
        done = invoke(*words, *(local if words[0] in ("rollout", "eval") else []))
        assert done.exit_code == 0, f"{command}\n{done.output}"
    last = (tmp_path / "out" / "first" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["completed"] is True


@pytest.mark.firstday
@pytest.mark.timeout(1800)
@each_page
def test_every_block_of_a_page_runs_in_an_empty_home(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(page, tmp_path / "work", tmp_path)
    for number, step in enumerate(session.steps(), start=1):
        began_at = time.monotonic()
        session.run(step, STEP_TIMEOUT_S)
        with capsys.disabled():
            seconds = time.monotonic() - began_at
            print(f"\n  {number}/{session.num_steps} {seconds:5.1f} s  {step.name}", flush=True)


def test_shell_blocks_hold_nothing_that_only_looks_like_a_command() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language in SHELL and "interlace " in block.text and block.not_run is None:
                assert block.commands or block.file, f"{page.name}, line {block.line}"
