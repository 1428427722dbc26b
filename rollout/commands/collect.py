"""Running tasks in a terminal: progress on screen, trajectories on disk as they finish."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console

from interlace.rollout.callbacks import Callback
from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.display import RolloutProgress
from interlace.rollout.failure_report import failure_table, write_failure
from interlace.rollout.launch.launcher import LaunchError
from interlace.rollout.output_folder import OutputFolder
from interlace.rollout.rollout import Rollout
from interlace.rollout.store import TrajectoryWriter
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import EndReason, Trajectory
from interlace.rollout.turns import RolloutError


def collect(
    config: RolloutConfig,
    tasks: Sequence[Task],
    folder: OutputFolder,
    console: Console,
    callbacks: Sequence[Callback],
) -> tuple[Rollout, list[Trajectory]]:
    """The ended rollout with its records, and its trajectories in the order they finished.

    On ranks of torchrun that only serve there are none.
    """
    with _told_in(folder, config):
        return _collect(config, tasks, folder, console, callbacks)


@contextmanager
def _told_in(folder: OutputFolder, config: RolloutConfig) -> Iterator[None]:
    """A failure of ranks is shown, and written into the folder, by the first rank that can."""
    try:
        yield
    except (LaunchError, RolloutError) as error:
        found = error.diagnosis
        torchrun = config.launch.kind == "torchrun"
        if found is None or (torchrun and os.environ.get("RANK") != str(found.speaker)):
            raise
        write_failure(folder.failure, found)
        Console(stderr=True).print(failure_table(found))
        text = f"{error}. All of it is in {folder.failure}"
        raise type(error)(text, found) from error


def _collect(
    config: RolloutConfig,
    tasks: Sequence[Task],
    folder: OutputFolder,
    console: Console,
    callbacks: Sequence[Callback],
) -> tuple[Rollout, list[Trajectory]]:
    console.print(f"starting {config.layout.world} ranks ({config.launch.kind})")
    trajectories: list[Trajectory] = []
    with ExitStack() as stack:
        try:
            rollout = stack.enter_context(Rollout(config, callbacks=callbacks))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not rollout.is_driver:
            return rollout, []
        writer = TrajectoryWriter(folder.trajectories)
        with writer, RolloutProgress(tasks, console, rollout.running) as progress:
            for trajectory in rollout.run(tasks):
                writer.append(trajectory)
                trajectories.append(trajectory)
                progress.add(trajectory)
    return rollout, trajectories


def environment_errors(trajectories: Sequence[Trajectory]) -> str | None:
    """How many there were, and the first of them; None if there were none."""
    wrong = [t for t in trajectories if t.end_reason is EndReason.ENVIRONMENT_ERROR]
    if not wrong:
        return None
    first = min(wrong, key=lambda trajectory: trajectory.trajectory_id)
    return (
        f"{len(wrong)} of {len(trajectories)} episodes ended in an environment error, the first "
        f"of them {first.task_id}: {first.info.get('error', 'unknown')}"
    )
