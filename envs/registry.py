"""Environments by name or import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium

ENVIRONMENTS: Mapping[str, str] = {
    "babyai": "interlace.envs.babyai:BabyAIText",
    "colossal_cave": "interlace.envs.colossal_cave:ColossalCave",
    "frozen_lake": "interlace.envs.frozen_lake:FrozenLakeText",
    "python": "interlace.envs.python_tool:PythonTool",
    "reasoning": "interlace.envs.reasoning:Reasoning",
    "scripted": "interlace.envs.scripted:Scripted",
    "sqlite": "interlace.envs.sqlite_tool:SqliteTool",
    "textworld": "interlace.envs.textworld_game:TextWorldGame",
}
"""Short names and where each environment is defined; imported when first asked for."""

EXTRAS: Mapping[str, str] = {
    "adventure": "demo",
    "minigrid": "babyai",
    "reasoning_gym": "reasoning",
    "textworld": "textworld",
}
"""Modules that not everybody needs, and the extra of this package that installs each."""


def make(env: str, params: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    """The environment called `env`, constructed with `params` as keyword arguments.

    `env` is a name of `ENVIRONMENTS` or the import path `package.module:Class` of anybody's
    gymnasium environment with text observations and actions.

    Raises ValueError for an unknown name, a path without such a class, or an object that is not a
    gymnasium.Env; ModuleNotFoundError when a package is not installed; whatever the constructor
    raises.
    """
    path = ENVIRONMENTS.get(env, env)
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(
            f"there is no environment {env!r}: choose one of {', '.join(sorted(ENVIRONMENTS))}, "
            "or give the import path of a class, as in my_package.my_module:MyEnvironment"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            raise
        raise ModuleNotFoundError(
            f"environment {env!r} needs the module {error.name}: pip install 'interlace[{extra}]'",
            name=error.name,
        ) from error
    constructor = getattr(module, class_name, None)
    if not callable(constructor):
        raise ValueError(f"environment {env!r}: module {module_name} has no class {class_name}")
    made = constructor(**params)
    if not isinstance(made, gymnasium.Env):
        raise ValueError(f"environment {env!r} made a {type(made).__name__}, not a gymnasium.Env")
    return made
