from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from interlace.rollout.cli import app
from interlace.rollout.config import RolloutConfig
from interlace.rollout.config_docs import config_markdown
from interlace.rollout.config_fields import ConfigSection, config_sections
from interlace.rollout.config_file import load_config
from interlace.rollout.job_template import job_template

DOCS = Path(__file__).parents[2] / "docs"


def init(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def test_the_written_job_loads_as_it_is_and_has_a_task(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    written = init(path)
    assert written.exit_code == 0, written.output
    config = load_config(job=path)
    assert config.model_dump(exclude={"tasks"}) == RolloutConfig().model_dump(exclude={"tasks"})
    assert [task.env for task in config.expand_tasks()] == ["frozen_lake"] * 4


def test_every_default_can_be_uncommented(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = re.sub(r"^#(\w+ = (?!   #))", r"\1", job_template(), flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    config = load_config(job=path)
    assert "numerics" in config.model_fields_set
    assert config.model_dump(exclude={"tasks"}) == RolloutConfig().model_dump(exclude={"tasks"})


def test_a_file_that_is_there_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("mine", encoding="utf-8")
    refused = init(path)
    assert refused.exit_code == 2
    assert "exists already: remove it, or give another name" in refused.stderr
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused = init(tmp_path / "nowhere" / "job.toml")
    assert refused.exit_code == 2
    assert "choose another folder" in refused.stderr


@pytest.mark.parametrize("section", config_sections(), ids=lambda section: section.name or "top")
def test_every_key_is_described(section: ConfigSection) -> None:
    assert section.fields
    assert all(field.description and field.kind for field in section.fields)


def test_the_reference_page_is_what_the_tree_says() -> None:
    page = (DOCS / "config.md").read_text(encoding="utf-8")
    assert page == config_markdown(), "docs/config.md is stale: run make docs"
