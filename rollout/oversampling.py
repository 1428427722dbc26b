"""More tasks than are needed: what of a run is given out, and where everything else goes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .trajectory import EndReason, Trajectory

Accept = Callable[[list[Trajectory]], bool]
"""Whether a finished, rewarded group, ordered by trajectory id, is worth giving out."""


class AcceptError(ValueError):
    """The accept function raised, or returned something that is no bool."""


class DropReason(StrEnum):
    """Why a trajectory was not given out."""

    ABORTED = "aborted"
    """It was ended before its end: as there was enough, by hand, by an update, or by a rank that
    failed."""
    UNFINISHED_GROUP = "unfinished_group"
    """It is finished, but another one of its group is not."""
    SURPLUS = "surplus"
    """Its group was finished when there was enough."""
    NOT_STARTED = "not_started"
    """There was enough before its turn came."""
    REJECTED = "rejected"
    """`accept` said no."""
    STALE = "stale"
    """It has tokens of weights that are too old."""

    @property
    def resumable(self) -> bool:
        """Whether another run may go on with it."""
        return self not in (DropReason.REJECTED, DropReason.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was not given out, so far."""

    lengths: Mapping[str, tuple[int, ...]]
    """Reason (a `DropReason`) -> the tokens each trajectory had sampled."""

    @property
    def by_reason(self) -> dict[str, int]:
        return {reason: len(lengths) for reason, lengths in self.lengths.items()}

    @property
    def num(self) -> int:
        return sum(map(len, self.lengths.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a caller wants of a run. ValueError for a number out of range."""

    want: int | None = None
    """Trajectories that are enough; None: all."""
    accept: Accept | None = None
    max_staleness: int | None = None
    """Most versions between a trajectory's oldest token and the weights in use."""

    def __post_init__(self) -> None:
        if self.want is not None and self.want < 1:
            raise ValueError(f"want must be at least 1, found {self.want}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, found {self.max_staleness}")

    @property
    def select(self) -> bool:
        """Whether something may be left out: groups are then given out whole or not at all."""
        return (self.want, self.accept, self.max_staleness) != (None, None, None)

    def too_old(self, group: list[Trajectory], version: int) -> bool:
        """Whether one of the group is too stale to be used with weights of `version`."""
        limit = self.max_staleness
        return limit is not None and any(staleness(member, version) > limit for member in group)


def staleness(trajectory: Trajectory, version: int) -> int:
    """Versions between its oldest sampled token and `version`; 0 if it has none."""
    versions = trajectory.version[trajectory.loss_mask]
    return version - int(versions.min()) if len(versions) else 0


def length_bias(given: list[int], dropped: Dropped) -> float | None:
    """Mean sampled tokens of what was given out, over that of all that was begun.

    1 without bias; below it, long trajectories were dropped more often than short ones. Those that
    were aborted count with the tokens they had, so the true ratio is lower still. None as long as
    there is nothing to compare.
    """
    begun = [
        length
        for reason, lengths in dropped.lengths.items()
        if reason != DropReason.NOT_STARTED
        for length in lengths
    ]
    mean = float(np.mean([*given, *begun])) if given else 0.0
    return float(np.mean(given)) / mean if mean > 0 else None


class Selection:
    """The state of one run. Every trajectory of it is given out or dropped, for one reason."""

    def __init__(
        self,
        rules: Rules,
        *,
        group_sizes: Mapping[str, int],
        by_group: bool,
        version: Callable[[], int],
    ) -> None:
        """`group_sizes`: how many of each group will end. `by_group`: groups wait until they are
        complete. `version`: that of the weights in use."""
        self._rules, self._sizes, self._by_group = rules, group_sizes, by_group
        self._version = version
        self._groups: dict[str, list[Trajectory]] = defaultdict(list)
        self._num_accepted = 0

    @property
    def enough(self) -> bool:
        """Nothing more is wanted."""
        return self._rules.want is not None and self._num_accepted >= self._rules.want

    def gather(self, trajectory: Trajectory) -> list[Trajectory]:
        """Its group, ordered by id, if it is complete now; empty if not."""
        name = trajectory.group_id
        if name is None or not self._by_group:
            return [trajectory]
        members = self._groups[name]
        members.append(trajectory)
        if len(members) < self._sizes[name]:
            return []
        return sorted(self._groups.pop(name), key=lambda member: member.trajectory_id)

    def useless(self, group: list[Trajectory]) -> DropReason | None:
        """Why a complete group is not worth rewarding, if it is not."""
        if not self._rules.select:
            return None
        if any(member.end_reason is EndReason.ABORTED for member in group):
            return DropReason.UNFINISHED_GROUP
        return DropReason.SURPLUS if self.enough else None

    async def judge(self, group: list[Trajectory]) -> DropReason | None:
        """Why a complete and rewarded group is not given out; None if it is: it counts now.

        Raises AcceptError.
        """
        if not self._rules.select:
            return None
        if self._rules.too_old(group, self._version()):
            return DropReason.STALE
        if self._rules.accept is not None and not await _asked(self._rules.accept, group):
            return DropReason.REJECTED
        if self.enough:
            return DropReason.SURPLUS
        self._num_accepted += len(group)
        return None

    def rest(self) -> list[Trajectory]:
        """Members of groups that are not complete though everything has ended."""
        members = [member for group in self._groups.values() for member in group]
        self._groups.clear()
        return members


def unused(group: list[Trajectory], otherwise: DropReason) -> list[tuple[Trajectory, DropReason]]:
    """Each of a group, and why it is not given out: it was aborted, or else `otherwise`."""
    return [
        (member, DropReason.ABORTED if member.end_reason is EndReason.ABORTED else otherwise)
        for member in group
    ]


async def _asked(accept: Accept, group: list[Trajectory]) -> bool:
    """In a thread: the episodes go on meanwhile."""
    try:
        answer = await asyncio.to_thread(accept, group)
    except Exception as error:
        raise AcceptError(f"accept raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, bool | np.bool_):
        raise AcceptError(f"accept returned {answer!r}: it must say True or False")
    return bool(answer)
