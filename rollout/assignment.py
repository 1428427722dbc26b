"""What a run is to play, one trajectory each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .partial import task_of
from .tasks import Task
from .trajectory import Trajectory
from .trajectory_ids import TrajectoryIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A trajectory to play: a task, from its beginning or from where it was aborted."""

    trajectory_id: int
    task: Task
    past: Trajectory | None = None


def assign(
    ids: TrajectoryIds,
    tasks: Sequence[Task],
    unfinished: Sequence[Trajectory],
    arrival_seed: int | None,
) -> list[Assignment]:
    """All with their numbers, in the order in which they enter: those that go on come first.

    `arrival_seed` shuffles the tasks. ValueError, and no number is taken, if one cannot go on.
    """
    again = [
        Assignment(trajectory_id=past.trajectory_id, task=task_of(past), past=past)
        for past in unfinished
    ]
    ids.claim([assignment.trajectory_id for assignment in again])
    first = [
        Assignment(trajectory_id=number, task=task)
        for number, task in zip(ids.new(len(tasks)), tasks, strict=True)
    ]
    if arrival_seed is not None:
        random.Random(arrival_seed).shuffle(first)
    return again + first
