"""Environments by name, by import path, and what an error tells."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from interlace.envs.frozen_lake import FrozenLakeText
from interlace.envs.registry import EXTRAS, make


def test_names_and_import_paths_lead_to_the_same_class() -> None:
    by_name = make("frozen_lake", {"size": 8})
    by_path = make("interlace.envs.frozen_lake:FrozenLakeText", {"size": 8})
    assert type(by_name) is type(by_path) is FrozenLakeText


@pytest.mark.parametrize("name", ["", "lake", "frozen_lake:", ":FrozenLakeText"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"babyai, colossal_cave, .*my_module:MyEnv"):
        make(name, {})


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"interlace.envs.frozen_lake has no class Lake"):
        make("interlace.envs.frozen_lake:Lake", {})


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"made a Fraction, not a gymnasium\.Env"):
        make("fractions:Fraction", {})


@pytest.mark.parametrize(
    ("name", "defined_in", "package", "extra"),
    [
        ("babyai", "babyai", "minigrid", "babyai"),
        ("colossal_cave", "colossal_cave", "adventure", "demo"),
        ("reasoning", "reasoning", "reasoning_gym", "reasoning"),
        ("textworld", "textworld_game", "textworld", "textworld"),
    ],
)
def test_a_missing_package_says_how_to_get_it(
    name: str, defined_in: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"interlace.envs.{defined_in}", raising=False)
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'interlace\[{extra}\]'"):
        make(name, {})


def test_every_extra_that_an_error_names_can_be_installed() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    known = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(known)
    assert known["all-envs"] == ["interlace[babyai,demo,reasoning,textworld]"]
