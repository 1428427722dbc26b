"""Interlace plays the work as it plays any: ranks, collector and environments of their own."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from interlace.rollout.config import RolloutConfig
from interlace.rollout.figures import Records
from interlace.rollout.latencies import token_times
from interlace.rollout.rollout import Rollout
from interlace.rollout.trajectory import Trajectory

from .played import PlayedPhase
from .process_tree import tree_cpu_s
from .scripts import Said
from .workload import Phase

Tell = Callable[[str], None]


class InexactError(RuntimeError):
    """A rank's kernels did not pass the self-test: the run does not measure the exact mode."""


def play_interlace(config: RolloutConfig, phases: Sequence[Phase], tell: Tell) -> list[PlayedPhase]:
    """All phases in one rollout, each from its tasks' start to its last trajectory's arrival.

    CPU is that of this process and all below it: ranks, environments, launcher. RuntimeError if a
    trajectory did not end well, InexactError if the ranks are not exact.
    """
    timed: list[tuple[float, float, float, list[Trajectory]]] = []
    with Rollout(config) as rollout:
        if not rollout.exact:
            raise InexactError("the ranks' self-test failed: this is not the exact mode")
        for phase in phases:
            tell(phase.name)
            cpu_s, began_at = tree_cpu_s(os.getpid()), time.monotonic()
            trajectories = list(rollout.run(phase.tasks))
            ended_at = time.monotonic()
            cpu_s = tree_cpu_s(os.getpid()) - cpu_s
            _check(trajectories)
            timed.append((began_at, ended_at, cpu_s, trajectories))
    times = _times(rollout.records)
    return [
        PlayedPhase(
            name=phase.name,
            began_at=began_at,
            ended_at=ended_at,
            cpu_s=cpu_s,
            said=[
                _said(one, times[one.trajectory_id])
                for one in sorted(trajectories, key=lambda t: t.trajectory_id)
            ],
        )
        for phase, (began_at, ended_at, cpu_s, trajectories) in zip(phases, timed, strict=True)
    ]


def _check(trajectories: Sequence[Trajectory]) -> None:
    for one in trajectories:
        if "error" in one.info:
            raise RuntimeError(f"{one.task_id} ended as {one.end_reason}: {one.info['error']}")


def _times(records: Records) -> dict[int, list[float]]:
    times: dict[int, list[float]] = defaultdict(list)
    for at, trajectory in sorted(token_times(records)):
        times[trajectory].append(at)
    return times


def _said(trajectory: Trajectory, times: Sequence[float]) -> list[Said]:
    turns, at = list[Said](), 0
    for turn in trajectory.turns:
        num = turn.stop - turn.start
        tokens = trajectory.token_ids[turn.start : turn.stop].tolist()
        turns.append(Said(tokens=tokens, times=list(times[at : at + num])))
        at += num
    return turns
