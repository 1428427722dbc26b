"""What commands that run a job have in common: its tasks, and what a newcomer should be told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from interlace.envs.registry import ENVIRONMENTS
from interlace.rollout.checkup import num_usable_cores
from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.config_file import load_config
from interlace.rollout.display import config_table
from interlace.rollout.tasks import PROMPT_ENV, Task


def read_job(job: Path | None, preset: str | None, overrides: list[str] | None) -> RolloutConfig:
    """The job of a command line; ConfigError if it names none."""
    if job is None and preset is None:
        raise ConfigError(
            "nothing to run: give a job file (interlace init writes one), or --preset tiny"
        )
    return load_config(job=job, preset=preset, overrides=overrides or ())


def tasks_of(config: RolloutConfig) -> list[Task]:
    """The job's tasks; ConfigError if there is none, or an environment is not known."""
    try:
        tasks = config.expand_tasks()
    except ValueError as error:
        raise ConfigError(f"tasks: {error}") from error
    for env in dict.fromkeys(task.env for task in tasks):
        if ":" not in env and env != PROMPT_ENV and env not in ENVIRONMENTS:
            known = ", ".join(sorted(ENVIRONMENTS))
            raise ConfigError(
                f"tasks: there is no environment {env!r}: choose one of {known}, or give the "
                "import path of a class, as in my_package.my_module:MyEnvironment"
            )
    return tasks


def is_driver(config: RolloutConfig) -> bool:
    """Whether this process shows and writes results: under torchrun only rank 0 does."""
    return config.launch.kind != "torchrun" or os.environ.get("RANK", "0") == "0"


def introduce(config: RolloutConfig) -> Console:
    """A console that has shown the configuration, and what a newcomer should be told about it.

    Silent where results are neither shown nor written.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not is_driver(config))
    console.print(config_table(config))
    if note := cores_note(config):
        console.print(f"note: {note}", style="yellow", markup=False)
    return console


def cores_note(config: RolloutConfig, num_cores: int | None = None) -> str | None:
    """A word of advice if ranks have to share cores of this machine."""
    cores = num_cores or num_usable_cores()
    world, launch = config.layout.world, config.launch
    if launch.kind != "ray" or launch.address or launch.backend != "gloo" or world <= cores:
        return None
    return (
        f"{world} ranks on {cores} cores take turns: right, but slow; "
        f"--set layout.world={cores} gives each a core"
    )


def on_one_host(arguments: Sequence[str]) -> list[str]:
    """A command line without its `--hosts`: what is to run once the hosts are there."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--hosts":
            next(words, None)
        elif not word.startswith("--hosts="):
            kept.append(word)
    return kept
