"""Episodes of environments on a pool of processes: one that fails takes no other with it.

A host process serves several episodes, one request at a time, so whoever's request was in flight
when it hung or died is to blame. The others go on: each keeps its seed and actions, and is replayed
on the next process at its next request, if it comes out the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from interlace.envs.host import EnvironmentHost, HostDied, SubprocessHost

__all__ = [
    "EnvironmentFailure",
    "EnvironmentHost",
    "EnvironmentPool",
    "Episode",
    "HostDied",
    "HostFactory",
    "HostStartError",
    "Observation",
    "StepOutcome",
    "SubprocessHost",
]

HostFactory = Callable[[int], Awaitable[EnvironmentHost]]
"""Starts the host of a given index; `SubprocessHost.start` is one."""

FailureKind = Literal["raised", "hung", "died", "invalid"]

_NUM_TRIES = 3
_T = TypeVar("_T")


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


class EnvironmentFailure(Exception):
    """One episode cannot go on; others are not concerned.

    `kind`: "raised" (the environment raised), "invalid" (it returned what the contract excludes),
    "hung" (it passed its deadline) or "died" (its process ended, it could not be replayed, or the
    pool was closed).
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class HostStartError(RuntimeError):
    """No environment process can be started: nothing that an episode did, all are concerned."""


class Episode:
    """One episode of one environment. Made by `EnvironmentPool.open`; close it to free its place.

    One request at a time. After an EnvironmentFailure every further request raises it again.
    """

    def __init__(self, pool: EnvironmentPool, room: _Room, record: _Record) -> None:
        """Use `EnvironmentPool.open`."""
        self._pool = pool
        self._room = room
        self._record = record

    async def reset(self) -> Observation:
        """Begin, with the seed given to `open`. Raises EnvironmentFailure."""
        reply = await self._room.reset(self._record)
        return Observation(text=reply["text"], info=reply["info"])

    async def step(self, action: str) -> StepOutcome:
        """Act. Raises EnvironmentFailure. A step whose caller is cancelled still takes place."""
        reply = await self._room.step(self._record, action)
        return StepOutcome(
            text=reply["text"],
            reward=reply["reward"],
            terminated=reply["terminated"],
            truncated=reply["truncated"],
            info=reply["info"],
        )

    async def close(self) -> None:
        """Free the place, once the environment has closed or its deadline passed. Never raises
        EnvironmentFailure; may be repeated."""
        await self._pool._leave(self._room, self._record)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


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
            _Room(index, factory, step_timeout_s, reset_timeout_s) for index in range(num_hosts)
        ]
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
        await self._places.acquire()
        if self._closed:
            self._places.release()  # wakes the next in line, who finds out as well
            raise _pool_closed()
        room = min(self._rooms, key=lambda room: (room.num_episodes, room.index))
        record = _Record(id=next(self._ids), env=env, params=dict(params), seed=seed)
        room.num_episodes += 1
        try:
            await room.open(record)
        except BaseException:
            await self._leave(room, record)
            raise
        return Episode(self, room, record)

    async def close(self) -> None:
        """End all hosts and everything in them; requests in flight raise EnvironmentFailure."""
        self._closed = True
        self._places.release()
        await asyncio.gather(*(room.close() for room in self._rooms))
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _leave(self, room: _Room, record: _Record) -> None:
        if not record.left:
            record.left = True
            task = asyncio.create_task(self._free(room, record))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            await asyncio.shield(task)

    async def _free(self, room: _Room, record: _Record) -> None:
        try:
            await room.leave(record)
        finally:
            room.num_episodes -= 1
            self._places.release()


class _Record:
    """What an episode is rebuilt from."""

    def __init__(self, *, id: int, env: str, params: dict[str, Any], seed: int) -> None:
        self.id = id
        self.env = env
        self.params = params
        self.seed = seed
        self.life: int | None = None
        """The life of its room's host in which the episode exists."""
        self.actions: list[str] = []
        self.digests: list[bytes] = []
        """Of the reset and of each action, as first seen; empty before the reset."""
        self.failure: EnvironmentFailure | None = None
        self.left = False


class _Room:
    """One host after another at the same index, and who lives there."""

    def __init__(
        self, index: int, factory: HostFactory, step_timeout_s: float, reset_timeout_s: float
    ) -> None:
        self.index = index
        self.num_episodes = 0
        self._factory = factory
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._turn = asyncio.Lock()
        self._host: EnvironmentHost | None = None
        self._life = 0
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def enter(self) -> None:
        """Start the host."""
        await self._alone(self._living_host)

    async def open(self, record: _Record) -> None:
        await self._alone(lambda: self._perform(record, None, 0))

    async def reset(self, record: _Record) -> dict[str, Any]:
        async def work() -> dict[str, Any]:
            # Forgotten first: a host that died meanwhile is not made to repeat what ends here.
            record.actions.clear()
            record.digests.clear()
            request = {"op": "reset", "episode": record.id, "seed": record.seed}
            reply = await self._perform(record, request, self._reset_timeout_s)
            record.digests.append(_digest(reply))
            return reply

        return await self._alone(work)

    async def step(self, record: _Record, action: str) -> dict[str, Any]:
        async def work() -> dict[str, Any]:
            request = {"op": "step", "episode": record.id, "action": action}
            reply = await self._perform(record, request, self._step_timeout_s)
            record.actions.append(action)
            record.digests.append(_digest(reply))
            return reply

        return await self._alone(work)

    async def leave(self, record: _Record) -> None:
        async def work() -> None:
            if self._host is not None and record.life == self._life:
                request = {"op": "close", "episode": record.id}
                await self._exchange(self._host, request, self._step_timeout_s)

        with contextlib.suppress(EnvironmentFailure, HostDied):
            await self._alone(work)

    async def close(self) -> None:
        """End the host; whoever waits for it raises."""
        self._closed = True
        if self._host is not None:
            self._discard(self._host)
        while self._tasks:
            for task in self._tasks:
                if task.get_name() == "environment host start":
                    task.cancel()
            await asyncio.wait(self._tasks)

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Do `work` when it is this caller's turn, to its end even if the caller is cancelled:
        a reply that nobody waits for must not be taken for the next one's."""
        await self._turn.acquire()

        async def turn() -> _T:
            try:
                return await work()
            finally:
                self._turn.release()

        return await asyncio.shield(self._keep(turn()))

    def _keep(self, work: Coroutine[Any, Any, _T], name: str | None = None) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if whoever waited is gone

    async def _perform(
        self, record: _Record, request: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Make sure `record` exists on a living host, then do `request`, if any."""
        if record.failure is not None:
            raise record.failure
        try:
            for _ in range(_NUM_TRIES):
                host = await self._living_host()
                try:
                    if record.life != self._life:
                        await self._rebuild(host, record)
                    if request is None:
                        return {}
                    return await self._exchange(host, request, timeout_s)
                except HostDied as error:
                    if not error.idle:
                        raise EnvironmentFailure("died", str(error)) from error
            raise EnvironmentFailure("died", f"{_NUM_TRIES} hosts ended before the request")
        except EnvironmentFailure as failure:
            record.failure = failure
            raise

    async def _rebuild(self, host: EnvironmentHost, record: _Record) -> None:
        request = {"op": "open", "episode": record.id, "env": record.env, "params": record.params}
        await self._exchange(host, request, self._reset_timeout_s)
        record.life = self._life
        for i, expected in enumerate(record.digests):
            if i == 0:
                request = {"op": "reset", "episode": record.id, "seed": record.seed}
                reply = await self._exchange(host, request, self._reset_timeout_s)
            else:
                request = {"op": "step", "episode": record.id, "action": record.actions[i - 1]}
                reply = await self._exchange(host, request, self._step_timeout_s)
            if _digest(reply) != expected:
                raise EnvironmentFailure(
                    "died",
                    f"its host ended because of another episode, and {record.env} is not "
                    f"reproducible: after seed {record.seed} and the same {i} actions its "
                    "observation, reward or end differs",
                )

    async def _exchange(
        self, host: EnvironmentHost, request: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """One request, and the end of a host that hangs. Raises EnvironmentFailure, HostDied."""
        if self._closed:
            raise _pool_closed()
        op = request["op"]
        try:
            async with asyncio.timeout(timeout_s):
                reply = _decoded(await host.call(json.dumps(request).encode("ascii")))
        except TimeoutError as error:
            self._discard(host)
            raise EnvironmentFailure("hung", f"{op} took more than {timeout_s:g} s") from error
        except HostDied as error:
            self._discard(host)
            if self._closed:
                raise _pool_closed() from error
            raise
        except BaseException:
            self._discard(host)
            raise
        if not reply["ok"]:
            raise EnvironmentFailure(reply["kind"], reply["message"])
        return reply

    async def _living_host(self) -> EnvironmentHost:
        errors: list[str] = []
        while self._host is None:
            if self._closed:
                raise _pool_closed()
            if len(errors) == _NUM_TRIES:
                raise HostStartError(
                    f"environment process {self.index} did not start in {_NUM_TRIES} tries: "
                    + "; ".join(dict.fromkeys(errors))
                )
            try:
                start = self._keep(self._start(), "environment host start")
                self._host = await start
            except asyncio.CancelledError:
                if self._closed:
                    raise _pool_closed() from None
                raise
            except Exception as error:  # whatever a factory raises, three times is enough
                errors.append(f"{type(error).__name__}: {error}")
        return self._host

    async def _start(self) -> EnvironmentHost:
        return await self._factory(self.index)

    def _discard(self, host: EnvironmentHost) -> None:
        if self._host is host:
            self._host = None
            self._life += 1
        host.kill()
        self._keep(_buried(host))


async def _buried(host: EnvironmentHost) -> None:
    with contextlib.suppress(HostDied):
        await host.call(b'{"op": "hello"}')


def _decoded(frame: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(frame)
    except ValueError as error:
        raise EnvironmentFailure("invalid", f"its host sent a damaged reply: {error}") from error
    if not isinstance(reply, dict) or "ok" not in reply:
        raise EnvironmentFailure("invalid", "its host sent a damaged reply")
    return reply


def _digest(reply: Mapping[str, Any]) -> bytes:
    """Of everything but `info`, which may hold times."""
    seen = {name: value for name, value in reply.items() if name != "info"}
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode("ascii")).digest()


def _pool_closed() -> EnvironmentFailure:
    return EnvironmentFailure("died", "the environment pool was closed")
