"""Environments by name, by import path, and what an error tells."""

from __future__ import annotations

import sys

import pytest

from interlace.envs.frozen_lake import FrozenLakeText
from interlace.envs.registry import make


def test_names_and_import_paths_lead_to_the_same_class() -> None:
    by_name = make("frozen_lake", {"size": 8})
    by_path = make("interlace.envs.frozen_lake:FrozenLakeText", {"size": 8})
    assert type(by_name) is type(by_path) is FrozenLakeText


@pytest.mark.parametrize("name", ["", "lake", "frozen_lake:", ":FrozenLakeText"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"colossal_cave, frozen_lake, sqlite.*my_module:MyEnv"):
        make(name, {})


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"interlace.envs.frozen_lake has no class Lake"):
        make("interlace.envs.frozen_lake:Lake", {})


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"made a Fraction, not a gymnasium\.Env"):
        make("fractions:Fraction", {})


def test_a_missing_package_of_the_cave_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "interlace.envs.colossal_cave", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "adventure"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "adventure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install interlace\[demo\]"):
        make("colossal_cave", {})
