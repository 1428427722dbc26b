"""Episodes of environments on a pool of processes: one that fails takes no other with it.

A host process serves several episodes, one request at a time, so whoever's request was in flight
when it hung or died is to blame. The others go on: each keeps its seed and actions, and is replayed
on the next process at its next request, if it comes out the same. `Episode.fork` branches an
episode by a copy of its environment, or by such a replay.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from interlace.envs.host import EnvironmentHost, HostDied, SubprocessHost
from interlace.rollout.environment_room import (
    EnvironmentFailure,
    FailureKind,
    HostFactory,
    HostStartError,
    Record,
    Room,
    pool_closed,
)

__all__ = [
    "EnvironmentFailure",
    "EnvironmentHost",
    "EnvironmentPool",
    "Episode",
    "FailureKind",
    "HostDied",
    "HostFactory",
    "HostStartError",
    "Observation",
    "Origin",
    "StepOutcome",
    "SubprocessHost",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an episode begins with."""

    text: str
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What an action led to."""

    text: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


Origin = Literal["opened", "copied", "replayed"]


class Episode:
    """One episode of one environment. Made by `EnvironmentPool.open` or `fork`; close it to free
    its place.

    One request at a time. After an EnvironmentFailure every further request raises it again.
    """

    def __init__(self, pool: EnvironmentPool, room: Room, record: Record, origin: Origin) -> None:
        """Use `EnvironmentPool.open`."""
        self._pool = pool
        self._room = room
        self._record = record
        self._left = False
        self.origin = origin
        """How it came to be: by `open`, or by a `fork` that copied or replayed."""

    async def reset(self) -> Observation:
        """Begin, with the seed given to `open`. Raises EnvironmentFailure.

        Answers `wait_s` seconds late if the info has that; nobody else waits, no deadline runs.
        """
        reply = await self._room.reset(self._record)
        await _held_back(reply["info"])
        return Observation(text=reply["text"], info=reply["info"])

    async def step(self, action: str) -> StepOutcome:
        """Act. Raises EnvironmentFailure. A step whose caller is cancelled still takes place.

        Waits as `reset` does.
        """
        reply = await self._room.step(self._record, action)
        await _held_back(reply["info"])
        return StepOutcome(
            text=reply["text"],
            reward=reply["reward"],
            terminated=reply["terminated"],
            truncated=reply["truncated"],
            info=reply["info"],
        )

    async def fork(self) -> Episode:
        """A second episode in the state of this one, after whatever step of it is in flight.

        The two go apart from here; this one does not notice. Waits for a free place, as
        `EnvironmentPool.open` does. The environment is copied if its class allows that (see
        `interlace.envs.snapshot.copied`) and its process has a free place; otherwise its seed and
        actions are replayed, here or in another process. Raises EnvironmentFailure if neither
        can be done: a replay that comes out different, for one, is of kind "died".
        """
        return await self._pool._fork(self._room, self._record)

    async def close(self) -> None:
        """Free the place, once the environment has closed or its deadline passed. Never raises
        EnvironmentFailure; may be repeated."""
        if not self._left:
            self._left = True
            await asyncio.shield(self._pool._free(self._room, self._record))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _held_back(info: Mapping[str, Any]) -> None:
    if wait_s := info.get("wait_s"):
        await asyncio.sleep(wait_s)


class EnvironmentPool:
    """At most `num_hosts` x `episodes_per_host` episodes at a time, in as many processes."""

    def __init__(
        self,
        *,
        factory: HostFactory,
        num_hosts: int,
        episodes_per_host: int,
        step_timeout_s: float,
        reset_timeout_s: float,
    ) -> None:
        """A step or a close may take `step_timeout_s` seconds, a reset or a construction
        `reset_timeout_s`, both from the moment the process turns to it.

        Raises ValueError for a number that is not positive.
        """
        for name, value in (
            ("num_hosts", num_hosts),
            ("episodes_per_host", episodes_per_host),
            ("step_timeout_s", step_timeout_s),
            ("reset_timeout_s", reset_timeout_s),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        self._rooms = [
            Room(index, factory, step_timeout_s, reset_timeout_s) for index in range(num_hosts)
        ]
        self._episodes_per_host = episodes_per_host
        self._places = asyncio.Semaphore(num_hosts * episodes_per_host)
        self._ids = itertools.count()
        self._closed = False
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start all hosts. Raises HostStartError, with none left, if one cannot be started."""
        try:
            async with asyncio.TaskGroup() as group:
                for room in self._rooms:
                    group.create_task(room.enter())
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self, env: str, params: Mapping[str, Any], seed: int) -> Episode:
        """Wait for a free place, then construct `env` (see `interlace.envs.registry.make`) there.

        Raises EnvironmentFailure if it cannot be constructed; the place is free again then.
        """
        room = await self._enter()
        record = Record(id=next(self._ids), env=env, params=dict(params), seed=seed)
        try:
            await room.open(record)
        except BaseException:
            self._free(room, record)
            raise
        return Episode(self, room, record, "opened")

    async def close(self) -> None:
        """End all hosts and everything in them; requests in flight raise EnvironmentFailure."""
        self._closed = True
        self._places.release()
        await asyncio.gather(*(room.close() for room in self._rooms))
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _fork(self, home: Room, source: Record) -> Episode:
        room = await self._enter(home)
        record = Record(id=next(self._ids), env=source.env, params=source.params, seed=source.seed)
        try:
            await home.branch(source, record, here=room is home)
            origin: Origin = "copied" if record.life is not None else "replayed"
            await room.open(record)
        except BaseException:
            self._free(room, record)
            raise
        return Episode(self, room, record, origin)

    async def _enter(self, home: Room | None = None) -> Room:
        """Take a place: in `home` if one is free there, else in the emptiest room."""
        await self._places.acquire()
        if self._closed:
            self._places.release()  # wakes the next in line, who finds out as well
            raise pool_closed()
        room = home
        if room is None or room.num_episodes >= self._episodes_per_host:
            room = min(self._rooms, key=lambda room: (room.num_episodes, room.index))
        room.num_episodes += 1
        return room

    def _free(self, room: Room, record: Record) -> asyncio.Task[None]:
        """Give the place back in the background: whoever leaves may be cancelled meanwhile."""

        async def leave() -> None:
            try:
                await room.leave(record)
            finally:
                room.num_episodes -= 1
                self._places.release()

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task
