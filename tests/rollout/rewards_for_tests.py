"""Reward functions that tests import by path."""

from __future__ import annotations

import threading

from interlace.rollout.trajectory import Trajectory


def length(trajectory: Trajectory) -> float:
    return float(trajectory.sampled_tokens)


async def rank_in_group(group: list[Trajectory]) -> list[float]:
    longest_first = sorted(group, key=lambda t: (-t.sampled_tokens, t.trajectory_id))
    return [float(longest_first.index(t)) for t in group]


def on_which_thread(trajectory: Trajectory) -> float:
    return float("interlace ranks" in threading.current_thread().name)


def raises(trajectory: Trajectory) -> float:
    raise RuntimeError("no reward today")


def says_nothing(trajectory: Trajectory) -> None:
    return None
