"""The pool's promises, on hosts inside this process that fail when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from interlace.envs.episode_table import EpisodeTable
from interlace.rollout.environments import (
    EnvironmentFailure,
    EnvironmentPool,
    HostDied,
    HostStartError,
)

LAKE = ("frozen_lake", {"is_slippery": True}, 3)


class FakeHost:
    """Answers from a table in this process; can be told to die, wait or lie."""

    def __init__(self) -> None:
        self.table = EpisodeTable()
        self.dead = False
        self.killed = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.ops: list[str] = []
        self.answer: bytes | None = None
        self.busy = False

    async def call(self, frame: bytes) -> bytes:
        if self.dead or self.killed.is_set():
            raise HostDied("the fake is gone", idle=True)
        assert not self.busy, "two requests in flight"
        self.busy = True
        try:
            await asyncio.sleep(0)
            waits = [asyncio.create_task(w) for w in (self.gate.wait(), self.killed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        finally:
            self.busy = False
        if self.killed.is_set():
            raise HostDied("the fake was killed")
        self.ops.append(json.loads(frame)["op"])
        return self.answer or self.table.handle_frame(frame)

    def kill(self) -> None:
        self.killed.set()


class Factory:
    """Remembers its hosts; fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.hosts: list[FakeHost] = []
        self.failures = failures

    async def __call__(self, index: int) -> FakeHost:
        if self.failures:
            self.failures -= 1
            raise OSError("no room for another process")
        self.hosts.append(FakeHost())
        return self.hosts[-1]


def with_pool(
    work: Callable[[EnvironmentPool, Factory], Coroutine[Any, Any, None]],
    factory: Factory | None = None,
    **changes: Any,
) -> None:
    made = factory or Factory()

    async def run() -> None:
        settings: dict[str, Any] = {
            "factory": made,
            "num_hosts": 1,
            "episodes_per_host": 2,
            "step_timeout_s": 30.0,
            "reset_timeout_s": 30.0,
        }
        async with EnvironmentPool(**settings | changes) as pool:
            await work(pool, made)
        assert all(host.killed.is_set() for host in made.hosts)

    asyncio.run(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_episodes_fill_hosts_evenly_and_wait_in_line_for_a_place() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        first = [await pool.open(*LAKE) for _ in range(4)]
        assert [host.ops for host in factory.hosts] == [["open", "open"]] * 2
        waiting = [asyncio.create_task(pool.open(*LAKE)) for _ in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        await first[0].close()
        await first[0].close()
        await asyncio.wait_for(waiting[0], 5)
        assert not waiting[1].done()
        waiting[1].cancel()
        await first[1].close()
        await asyncio.wait_for(pool.open(*LAKE), 5)

    with_pool(work, num_hosts=2)


def test_an_environment_that_cannot_be_made_frees_its_place() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        for _ in range(5):
            with pytest.raises(EnvironmentFailure, match="raised: ValueError: max_steps"):
                await pool.open("frozen_lake", {"max_steps": 0}, 0)
        assert len(factory.hosts) == 1

    with_pool(work)


def test_a_host_that_died_between_requests_blames_nobody() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode = await pool.open(*LAKE)
        await episode.reset()
        await episode.step("right")
        factory.hosts[0].dead = True
        await episode.step("down")
        assert factory.hosts[1].ops == ["open", "reset", "step", "step"]

    with_pool(work)


def test_a_reset_after_a_death_does_not_replay_what_it_ends() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode = await pool.open(*LAKE)
        first = await episode.reset()
        await episode.step("right")
        factory.hosts[0].dead = True
        assert await episode.reset() == first
        assert factory.hosts[1].ops == ["open", "reset"]

    with_pool(work)


def test_hosts_that_die_at_once_again_and_again_end_the_episode() -> None:
    class Doomed(Factory):
        async def __call__(self, index: int) -> FakeHost:
            host = await super().__call__(index)
            host.dead = True
            return host

    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        with pytest.raises(EnvironmentFailure, match="3 hosts ended before the request"):
            await pool.open(*LAKE)

    with_pool(work, Doomed())


def test_a_cancelled_step_takes_place_and_the_next_gets_its_own_reply() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode, other = await pool.open(*LAKE), await pool.open(*LAKE)
        await episode.reset()
        await other.reset()
        host = factory.hosts[0]
        host.gate.clear()
        step = asyncio.create_task(episode.step("right"))
        behind = asyncio.create_task(other.step("nonsense"))
        dropped = asyncio.create_task(other.step("right"))
        await settle()
        step.cancel()
        dropped.cancel()
        await settle()
        assert step.cancelled()
        assert dropped.cancelled()
        host.gate.set()
        assert (await behind).text == "Say left, down, right or up."
        await episode.close()
        await other.close()
        assert host.ops[-4:] == ["step", "step", "close", "close"]
        assert len(factory.hosts) == 1

    with_pool(work)


def test_closing_wakes_everybody_who_waits() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode, other = await pool.open(*LAKE), await pool.open(*LAKE)
        factory.hosts[0].gate.clear()
        waiting = [
            asyncio.create_task(call)
            for call in (episode.reset(), other.reset(), pool.open(*LAKE), pool.open(*LAKE))
        ]
        leaving = asyncio.create_task(other.close())
        await settle()
        await pool.close()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EnvironmentFailure)
            assert "pool was closed" in result.message
        await leaving
        await episode.close()
        with pytest.raises(EnvironmentFailure, match="pool was closed"):
            await pool.open(*LAKE)

    with_pool(work)


def test_closing_does_not_wait_for_a_host_that_is_still_starting() -> None:
    class Slow(Factory):
        async def __call__(self, index: int) -> FakeHost:
            if self.hosts:
                await asyncio.sleep(1e6)
            return await super().__call__(index)

    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode = await pool.open(*LAKE)
        factory.hosts[0].dead = True
        step = asyncio.create_task(episode.reset())
        await settle()
        await asyncio.wait_for(pool.close(), 5)
        with pytest.raises(EnvironmentFailure, match="pool was closed"):
            await step

    with_pool(work, Slow())


def test_a_factory_may_fail_twice_but_not_three_times() -> None:
    async def nothing(pool: EnvironmentPool, factory: Factory) -> None:
        assert len(factory.hosts) == 1

    with_pool(nothing, Factory(failures=2))
    with pytest.raises(HostStartError, match=r"did not start in 3 tries: OSError: no room"):
        with_pool(nothing, Factory(failures=3))


@pytest.mark.parametrize("answer", [b"{", b"[]", b"null", b"{}"])
def test_a_damaged_reply_costs_the_host_and_one_episode(answer: bytes) -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode, other = await pool.open(*LAKE), await pool.open(*LAKE)
        await other.reset()
        factory.hosts[0].answer = answer
        with pytest.raises(EnvironmentFailure, match="damaged reply"):
            await episode.reset()
        await other.step("down")
        assert factory.hosts[1].ops == ["open", "reset", "step"]

    with_pool(work)


def test_an_action_too_large_to_send_is_refused_and_the_host_lives() -> None:
    async def work(pool: EnvironmentPool, factory: Factory) -> None:
        episode = await pool.open(*LAKE)
        await episode.reset()
        with pytest.raises(EnvironmentFailure, match="invalid: step sends"):
            await episode.step("x" * (17 * 1024 * 1024))
        assert len(factory.hosts) == 1

    with_pool(work)


@pytest.mark.parametrize("name", ["num_hosts", "episodes_per_host", "step_timeout_s"])
def test_numbers_must_be_positive(name: str) -> None:
    settings: dict[str, Any] = {
        "factory": Factory(),
        "num_hosts": 1,
        "episodes_per_host": 1,
        "step_timeout_s": 1.0,
        "reset_timeout_s": 1.0,
    }
    with pytest.raises(ValueError, match=f"{name} must be positive, not 0"):
        EnvironmentPool(**settings | {name: 0})
