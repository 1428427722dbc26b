"""Rewards computed by a user's function after an episode, on top of or instead of the env's own."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from .trajectory import Trajectory

RewardFn = Callable[[Any], Any]


class RewardError(ValueError):
    """The reward function is missing, raised, or returned something that is no reward."""


def import_reward_fn(path: str) -> RewardFn:
    """The function at ``module:function``; RewardError says what of it cannot be found."""
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"rewards.reward_fn {path!r}: {error}") from error
    if not callable(function):
        raise RewardError(f"rewards.reward_fn {path!r} is a {type(function).__name__}, no function")
    found: RewardFn = function
    return found


class Rewarder:
    """Replaces the turns' rewards with what the function says.

    Per trajectory it receives one `Trajectory` and returns a number (for the last turn) or one
    number per turn; per group it receives the list of a group's trajectories, ordered by id, and
    returns one such answer for each. Plain functions run in a thread, coroutine functions in the
    collector's event loop; neither runs on a rank's thread.
    """

    def __init__(
        self, function: RewardFn, per: Literal["trajectory", "group"], group_sizes: dict[str, int]
    ) -> None:
        """`group_sizes`: how many trajectories of each group will come."""
        self._function, self._per, self._sizes = function, per, group_sizes
        self._groups: dict[str, list[Trajectory]] = defaultdict(list)

    async def reward(self, trajectory: Trajectory) -> list[Trajectory]:
        """The trajectories that are complete now: this one, its whole group, or none yet."""
        if self._per == "trajectory" or trajectory.group_id is None:
            members = [trajectory]
            answers = [await self._call(trajectory if self._per == "trajectory" else members)]
            if self._per == "group":
                answers = self._check_answers(answers[0], members)
        else:
            members = self._groups[trajectory.group_id]
            members.append(trajectory)
            if len(members) < self._sizes[trajectory.group_id]:
                return []
            del self._groups[trajectory.group_id]
            members.sort(key=lambda member: member.trajectory_id)
            answers = self._check_answers(await self._call(members), members)
        return [_rewarded(t, a) for t, a in zip(members, answers, strict=True)]

    async def _call(self, argument: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(argument)
            answer = await asyncio.to_thread(self._function, argument)
            return await answer if isinstance(answer, Awaitable) else answer
        except Exception as error:
            raise RewardError(
                f"the reward function raised {type(error).__name__}: {error}"
            ) from error

    def _check_answers(self, answers: Any, members: Sequence[Trajectory]) -> list[Any]:
        if not isinstance(answers, Sequence) or len(answers) != len(members):
            raise RewardError(
                f"the reward function received a group of {len(members)} and returned {answers!r}: "
                "one answer for each is needed"
            )
        return list(answers)


def _rewarded(trajectory: Trajectory, answer: Any) -> Trajectory:
    if not trajectory.turns:
        return trajectory
    try:
        return trajectory.with_rewards(answer)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"trajectory {trajectory.trajectory_id}: {answer!r} is no reward: {error}"
        ) from error
