"""Plays what runs ask for: so many episodes at a time, results as they are wanted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .assignment import Assignment
from .collector import Collector
from .config import Unsafe
from .episode import Episode
from .meter import Meter
from .oversampling import DropReason, Rules, Selection, unused
from .partial import is_finished
from .rewards import Rewarder, RewardFn
from .run import Run
from .trajectory import EndReason, Trajectory
from .trajectory_ids import TrajectoryIds
from .turns import RolloutError, Turns
from .unsafe_mark import marked


@dataclass(slots=True, kw_only=True)
class _Round:
    """A run while it is played."""

    run: Run
    selection: Selection
    rewarder: Rewarder | None
    stopping: asyncio.Event
    waiting: deque[Assignment]
    playing: set[int] = field(default_factory=set)
    feeder: asyncio.Task[None] | None = None
    failure: RolloutError | None = None
    """Of a rank, that has ended something of it too early."""


class Player:
    """Lives in the collector's event loop. Any number of runs at once share its places."""

    def __init__(
        self,
        *,
        collector: Collector,
        turns: Turns,
        meter: Meter,
        ids: TrajectoryIds,
        version: Callable[[], int],
        num_places: int,
        results_queue: int,
        reward_fn: RewardFn | None,
        rewards_per: Literal["trajectory", "group"],
        unsafe: Unsafe,
    ) -> None:
        """`version`: of the weights in use. `num_places`: episodes at a time. `results_queue`: no
        new ones while so many finished trajectories wait for the caller."""
        self.wall_s = 0.0
        """Seconds from the first task's start to the last trajectory's end."""
        self._collector, self._turns, self._meter, self._ids = collector, turns, meter, ids
        self._version, self._unsafe = version, unsafe
        self._reward_fn, self._rewards_per = reward_fn, rewards_per
        self._places = asyncio.Semaphore(num_places)
        self._results_queue, self._untaken, self._room = results_queue, 0, asyncio.Event()
        self._room.set()
        self._began_at: float | None = None

    async def play(
        self, assignments: Sequence[Assignment], run: Run, rules: Rules, stopping: asyncio.Event
    ) -> None:
        """Start all, one after the other, while there are places and the caller keeps up, until
        `stopping` is set: by the caller, or here once there is enough. Ends the run."""
        sizes = Counter(a.task.group_id for a in assignments if a.task.group_id is not None)
        rewarder = None
        if self._reward_fn is not None:
            rewarder = Rewarder(self._reward_fn, self._rewards_per, dict(sizes))
        grouped = rules.select or (rewarder is not None and self._rewards_per == "group")
        playing = _Round(
            run=run,
            selection=Selection(rules, group_sizes=sizes, by_group=grouped, version=self._version),
            rewarder=rewarder,
            stopping=stopping,
            waiting=deque(assignments),
        )
        for assignment in assignments:
            self._turns.expect(assignment.trajectory_id)
        self._began_at = self._began_at or time.monotonic()
        try:
            await self._play(playing)
        except asyncio.CancelledError:
            run.put(RolloutError("the rollout was left before this run had ended"))
            raise
        finally:
            run.end()

    def taken(self, num: int) -> None:
        """The caller has so many trajectories fewer to take."""
        self._untaken -= num
        if self._untaken < self._results_queue:
            self._room.set()

    async def _play(self, playing: _Round) -> None:
        try:
            async with asyncio.TaskGroup() as around:
                ticking = around.create_task(self._meter.tick())
                stopper = around.create_task(self._stop_in_time(playing))
                async with asyncio.TaskGroup() as group:
                    playing.feeder = group.create_task(self._feed(playing, group))
                ticking.cancel()
                stopper.cancel()
            self._drop(playing, unused(playing.selection.rest(), DropReason.UNFINISHED_GROUP))
            not_started = [_as_it_is(assignment) for assignment in playing.waiting]
            for trajectory in not_started:
                self._turns.ended(trajectory.trajectory_id)
            self._drop(playing, [(each, DropReason.NOT_STARTED) for each in not_started])
            if playing.failure is not None:
                raise playing.failure
        except* Exception as errors:
            playing.run.put(_first(errors))

    async def _feed(self, playing: _Round, group: asyncio.TaskGroup) -> None:
        for assignment in list(playing.waiting):
            if assignment.past is not None and is_finished(assignment.past):
                playing.waiting.remove(assignment)
                group.create_task(self._ended(playing, assignment.past))
        while playing.waiting:
            await self._turns.opened()
            await self._room.wait()
            await self._places.acquire()
            assignment = playing.waiting.popleft()
            playing.playing.add(assignment.trajectory_id)
            group.create_task(self._deliver(playing, assignment))

    async def _stop_in_time(self, playing: _Round) -> None:
        await playing.stopping.wait()
        if playing.feeder is not None:
            playing.feeder.cancel()
        for number in sorted(playing.playing):
            self._turns.abort(number)

    async def _deliver(self, playing: _Round, assignment: Assignment) -> None:
        number, task = assignment.trajectory_id, assignment.task
        try:
            with self._meter.playing(task.env):
                played = await self._collector.play(number, task, assignment.past)
        finally:
            self._places.release()
            playing.playing.remove(number)
        played = marked(played, self._unsafe)
        if self._turns.failure is not None and not is_finished(played):
            playing.failure = self._turns.failure
            playing.stopping.set()
            self._drop(playing, [(played, DropReason.ABORTED)])
            return
        await self._ended(playing, played)

    async def _ended(self, playing: _Round, trajectory: Trajectory) -> None:
        """Give the trajectory out, with its group, or say why not."""
        selection = playing.selection
        group = selection.gather(trajectory)
        self.wall_s = time.monotonic() - (self._began_at or 0.0)
        if not group:
            return
        reason = selection.useless(group)
        if reason is not None:
            self._drop(playing, unused(group, reason))
            return
        rewarded = await self._rewarded(group, playing.rewarder)
        reason = await selection.judge(rewarded)
        self.wall_s = time.monotonic() - (self._began_at or 0.0)
        if reason is not None:  # who resumes it is to reward it anew
            self._drop(playing, [(t, reason) for t in (group if reason.resumable else rewarded)])
            return
        self._give_out(playing, group, rewarded)
        if selection.enough:
            playing.stopping.set()

    def _give_out(
        self, playing: _Round, played: list[Trajectory], rewarded: list[Trajectory]
    ) -> None:
        for trajectory in rewarded:
            self._meter.finished(trajectory)
        for trajectory in played:
            if not is_finished(trajectory):
                self._ids.give_back(trajectory.trajectory_id)
                playing.run.keep(trajectory)
        self._untaken += len(rewarded)
        playing.run.put(rewarded)
        if self._untaken >= self._results_queue:
            self._room.clear()

    async def _rewarded(
        self, group: list[Trajectory], rewarder: Rewarder | None
    ) -> list[Trajectory]:
        if rewarder is None:
            return group
        each = await asyncio.gather(*(rewarder.reward(member) for member in group))
        return [trajectory for some in each for trajectory in some]

    def _drop(self, playing: _Round, whom: Sequence[tuple[Trajectory, DropReason]]) -> None:
        for trajectory, reason in whom:
            if reason.resumable:
                self._ids.give_back(trajectory.trajectory_id)
        playing.run.drop(whom)


def _as_it_is(assignment: Assignment) -> Trajectory:
    """What somebody may resume who has not begun with it."""
    if assignment.past is not None:
        return assignment.past
    return Episode(assignment.trajectory_id, assignment.task, 0, None).trajectory(EndReason.ABORTED)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """What made a group of tasks fail: a RolloutError if there is one, else the first."""
    leaves: list[Exception] = []
    pending: list[Any] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RolloutError)), leaves[0])
