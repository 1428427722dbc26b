"""The trajectories of one call of `Rollout.run`, as they finish."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from .oversampling import Dropped, DropReason, Rules, length_bias
from .trajectory import Trajectory

_Item = list[Trajectory] | BaseException | None


class Run:
    """Iterate it, with ``for`` or ``async for``, once. Finished trajectories wait in a queue.

    Raises what made the run fail (RolloutError, RewardError, AcceptError), once, in place of the
    next one.
    """

    def __init__(
        self,
        total: int,
        *,
        rules: Rules | None = None,
        version: Callable[[], int] = lambda: 0,
        taken: Callable[[int], None] = lambda num: None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`version`: of the weights in use. `taken` is told how many trajectories the caller has
        received or will never receive."""
        self.total = total
        """Trajectories it gives; at most, where some may be left out."""
        self._rules, self._version = rules or Rules(), version
        self._taken, self._stop = taken, stop
        self._finished: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._partials: list[Trajectory] = []
        self._given: list[int] = []
        self._dropped: dict[DropReason, list[int]] = {reason: [] for reason in DropReason}

    def __len__(self) -> int:
        return self.total

    # ---- for the caller

    @property
    def partials(self) -> list[Trajectory]:
        """What may be given to another run as `resume`, complete once this one has ended.

        Aborted trajectories and, where groups wait until they are complete, the finished members of
        groups that were not; also those that were not begun, without tokens. In a run that leaves
        nothing out, aborted ones are among what is iterated as well, unless a rank has failed.
        """
        return sorted(self._partials, key=lambda trajectory: trajectory.trajectory_id)

    @property
    def dropped(self) -> Dropped:
        """What has not been given out, so far, and how long it was; with what is in `partials`."""
        lengths = {reason.value: tuple(each) for reason, each in self._dropped.items() if each}
        return Dropped(lengths=lengths)

    @property
    def length_bias(self) -> float | None:
        """See `interlace.rollout.oversampling.length_bias`."""
        return length_bias(self._given, self.dropped)

    def stop(self) -> None:
        """Give out no more than what is finished: abort the rest, as if there were enough.

        Returns at once. The iteration ends when everything in play has, which an environment's
        step may delay up to its deadline.
        """
        self._stop()

    def __iter__(self) -> Iterator[Trajectory]:
        while (group := self._open(self._finished.get())) is not None:
            yield from group

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        while (group := self._open(await asyncio.to_thread(self._finished.get))) is not None:
            for trajectory in group:
                yield trajectory

    # ---- from the collector

    def put(self, item: list[Trajectory] | BaseException) -> None:
        """More are finished, to be given out one after the other, or the run has failed."""
        self._finished.put(item)

    def drop(self, whom: Sequence[tuple[Trajectory, DropReason]]) -> None:
        """These are not given out."""
        for trajectory, reason in whom:
            self._dropped[reason].append(trajectory.sampled_tokens)
            if reason.resumable:
                self._partials.append(trajectory)

    def keep(self, trajectory: Trajectory) -> None:
        """It is given out, and may be resumed."""
        self._partials.append(trajectory)

    def end(self) -> None:
        """Nothing more will come."""
        self._finished.put(None)

    def _open(self, item: _Item) -> list[Trajectory] | None:
        if item is None:
            self._finished.put(None)  # whoever asks again is answered
            return None
        if isinstance(item, BaseException):
            raise item
        self._taken(len(item))
        if self._rules.too_old(item, self._version()):  # has become so while it waited
            self.drop([(trajectory, DropReason.STALE) for trajectory in item])
            return []
        self._given += [trajectory.sampled_tokens for trajectory in item]
        return item
