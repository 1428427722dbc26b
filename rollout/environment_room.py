"""One host process after another, and the episodes that live there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

from interlace.envs.frames import MAX_FRAME_BYTES
from interlace.envs.host import EnvironmentHost, HostDied

HostFactory = Callable[[int], Awaitable[EnvironmentHost]]
"""Starts the host of a given index; `SubprocessHost.start` is one."""

FailureKind = Literal["raised", "hung", "died", "invalid"]

_NUM_TRIES = 3
_T = TypeVar("_T")


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


class Record:
    """What an episode is rebuilt from; belongs to its room."""

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


class Room:
    """Serves the requests of its episodes one at a time, on whichever host lives at `index`.

    Requests raise EnvironmentFailure for the episode to blame and HostStartError for none.
    """

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
        self._starting: asyncio.Task[EnvironmentHost] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def enter(self) -> None:
        """Start the host."""
        await self._alone(self._living_host)

    async def open(self, record: Record) -> None:
        """Construct the environment."""
        await self._alone(lambda: self._perform(record, None, 0))

    async def reset(self, record: Record) -> dict[str, Any]:
        """Begin the episode; the reply of the table."""

        async def work() -> dict[str, Any]:
            # Forgotten first: a host that died meanwhile is not made to repeat what ends here.
            record.actions.clear()
            record.digests.clear()
            request = {"op": "reset", "episode": record.id, "seed": record.seed}
            reply = await self._perform(record, request, self._reset_timeout_s)
            record.digests.append(_digest(reply))
            return reply

        return await self._alone(work)

    async def step(self, record: Record, action: str) -> dict[str, Any]:
        """Act, and remember it; the reply of the table."""

        async def work() -> dict[str, Any]:
            request = {"op": "step", "episode": record.id, "action": action}
            reply = await self._perform(record, request, self._step_timeout_s)
            record.actions.append(action)
            record.digests.append(_digest(reply))
            return reply

        return await self._alone(work)

    async def branch(self, source: Record, record: Record, *, here: bool) -> None:
        """Give `record` the past of `source`, as soon as no step of that is in flight; if `here`,
        and the environment can be copied, also its episode."""

        async def work() -> None:
            if source.failure is not None:
                raise EnvironmentFailure(source.failure.kind, source.failure.message)
            record.actions += source.actions
            record.digests += source.digests
            if here and self._host is not None and source.life == self._life:
                await self._copy(self._host, source, record)

        await self._alone(work)

    async def _copy(self, host: EnvironmentHost, source: Record, record: Record) -> None:
        request = {"op": "copy", "episode": record.id, "source": source.id}
        try:
            reply = await self._exchange(host, request, self._reset_timeout_s)
        except HostDied as error:
            if not error.idle:
                raise EnvironmentFailure("died", str(error)) from error
        else:
            if reply["copied"]:
                record.life = self._life

    async def leave(self, record: Record) -> None:
        """Close the environment if it exists; raises nothing."""

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
        if self._starting is not None:
            self._starting.cancel()
        while self._tasks:
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

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if whoever waited is gone

    async def _perform(
        self, record: Record, request: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Make sure `record` exists on a living host, then do `request`, if any."""
        if record.failure is not None:
            raise EnvironmentFailure(record.failure.kind, record.failure.message)
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

    async def _rebuild(self, host: EnvironmentHost, record: Record) -> None:
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
                    f"it had to be replayed, and {record.env} is not reproducible: after seed "
                    f"{record.seed} and the same {i} actions its observation, reward or end "
                    "differs",
                )

    async def _exchange(
        self, host: EnvironmentHost, request: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """One request, and the end of a host that hangs. Raises EnvironmentFailure, HostDied."""
        if self._closed:
            raise pool_closed()
        op = request["op"]
        frame = json.dumps(request).encode("ascii")
        if len(frame) > MAX_FRAME_BYTES:
            raise EnvironmentFailure(
                "invalid", f"{op} sends {len(frame)} bytes: at most {MAX_FRAME_BYTES} are taken"
            )
        try:
            async with asyncio.timeout(timeout_s):
                reply = _decoded(await host.call(frame))
        except TimeoutError as error:
            self._discard(host)
            raise EnvironmentFailure("hung", f"{op} took more than {timeout_s:g} s") from error
        except HostDied as error:
            self._discard(host)
            if self._closed:
                raise pool_closed() from error
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
                raise pool_closed()
            if len(errors) == _NUM_TRIES:
                raise HostStartError(
                    f"environment process {self.index} did not start in {_NUM_TRIES} tries: "
                    + "; ".join(dict.fromkeys(errors))
                )
            try:
                self._starting = self._keep(self._start())
                self._host = await self._starting
            except asyncio.CancelledError:
                if self._closed:
                    raise pool_closed() from None
                raise
            except Exception as error:  # whatever a factory raises, three times is enough
                errors.append(f"{type(error).__name__}: {error}")
            finally:
                self._starting = None
            if self._closed and self._host is not None:
                self._discard(self._host)  # it came up while the pool went down
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


def pool_closed() -> EnvironmentFailure:
    """What every request to a closed pool raises."""
    return EnvironmentFailure("died", "the environment pool was closed")
