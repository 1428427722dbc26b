"""Branching: forks of an episode start where it is and go their own ways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from interlace.envs.episode_table import EpisodeTable
from interlace.envs.host import HostDied
from interlace.rollout.environments import (
    EnvironmentFailure,
    EnvironmentPool,
    Episode,
    SubprocessHost,
)


class TableHost:
    """A table in this process."""

    def __init__(self) -> None:
        self.table = EpisodeTable()
        self.frames: list[bytes] = []
        self.dead = False

    async def call(self, frame: bytes) -> bytes:
        if self.dead:
            raise HostDied("the fake is gone", idle=True)
        await asyncio.sleep(0)
        self.frames.append(frame)
        return self.table.handle_frame(frame)

    def kill(self) -> None:
        self.dead = True

    def count(self, op: str) -> int:
        return sum(f'"op": "{op}"'.encode() in frame for frame in self.frames)


Work = Callable[[EnvironmentPool, list[TableHost]], Awaitable[None]]


def with_pool(work: Work, *, num_hosts: int = 1, episodes_per_host: int = 4) -> None:
    hosts: list[TableHost] = []

    async def factory(index: int) -> TableHost:
        hosts.append(TableHost())
        return hosts[-1]

    async def run() -> None:
        async with EnvironmentPool(
            factory=factory,
            num_hosts=num_hosts,
            episodes_per_host=episodes_per_host,
            step_timeout_s=30.0,
            reset_timeout_s=30.0,
        ) as pool:
            await work(pool, hosts)

    asyncio.run(run())


async def played(episode: Episode, actions: Iterable[str]) -> list[Any]:
    seen = []
    for action in actions:
        outcome = await episode.step(action)
        seen.append((outcome.text, outcome.reward, outcome.terminated, outcome.truncated))
        if outcome.terminated or outcome.truncated:
            break
    return seen


LAKE = ("frozen_lake", {"is_slippery": True, "random_map": True, "size": 6}, 7)
EPISODES = {
    "frozen_lake": (LAKE, ["right", "down"], ["down", "right"] * 5),
    "babyai": (
        ("babyai", {"level": "BabyAI-BossLevel-v0"}, 4),
        ["left", "forward"],
        ["forward", "right", "forward", "pick up", "left", "toggle"],
    ),
    "sqlite": (
        ("sqlite", {}, 3),
        ["SELECT 1"],
        ["SELECT * FROM orders", "SELECT name FROM customers", "ANSWER: 3"],
    ),
    "colossal_cave": (
        ("colossal_cave", {}, 11),
        ["in", "take lamp"],
        ["out", "down", "down", "down", "west", "look"],
    ),
}


@pytest.mark.parametrize("name", sorted(EPISODES))
def test_a_fork_goes_on_as_the_original_would_have(name: str) -> None:
    task, before, after = EPISODES[name]

    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open(*task)
        await original.reset()
        await played(original, before)
        fork = await original.fork()
        assert (original.origin, fork.origin) == ("opened", "copied")
        expected = await played(fork, after)
        assert len(expected) > 1
        assert await played(original, after) == expected

    with_pool(work)


def test_a_group_starts_from_the_middle_of_an_episode_and_its_members_diverge() -> None:
    words = ["inventory", "out", "drop lamp", "look"]

    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        trunk = await pool.open("colossal_cave", {}, 5)
        await trunk.reset()
        await played(trunk, ["in", "take lamp"])
        group = [await trunk.fork() for _ in words]
        firsts = await asyncio.gather(
            *(played(fork, [word]) for fork, word in zip(group, words, strict=True))
        )
        assert len({first[0][0] for first in firsts}) == len(words)
        carried = [(await played(fork, ["inventory"]))[0][0] for fork in group]
        assert ["lantern" in text.lower() for text in carried] == [True, True, False, True]
        assert hosts[0].count("step") == 2 + 4 + 4, "nothing was replayed"
        twig = await group[2].fork()
        assert (await played(twig, ["inventory"]))[0][0] == carried[2]

    with_pool(work, episodes_per_host=6)


def test_without_a_place_beside_it_a_fork_is_replayed_elsewhere() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open(*LAKE)
        await original.reset()
        await played(original, ["right", "down"])
        fork = await original.fork()
        assert fork.origin == "replayed"
        assert [host.count("step") for host in hosts] == [2, 2]
        assert await played(fork, ["down", "right"]) == await played(original, ["down", "right"])

    with_pool(work, num_hosts=2, episodes_per_host=1)


@pytest.mark.processes
def test_an_environment_without_copies_is_replayed_beside_the_original() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open("python", {"timeout_s": 20.0}, 0)
        await original.reset()
        await played(original, ["x = [1]", "x.append(len(x))"])
        fork = await original.fork()
        assert fork.origin == "replayed"
        assert (hosts[0].count("copy"), hosts[0].count("step")) == (1, 4)
        assert (await played(fork, ["x.append(7)", "x"]))[1][0] == "[1, 1, 7]"
        assert (await played(original, ["x"]))[0][0] == "[1, 1]"
        await original.close()
        await fork.close()

    with_pool(work)


def test_a_fork_of_an_episode_whose_host_died_is_replayed() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open(*LAKE)
        await original.reset()
        await played(original, ["right"])
        hosts[0].dead = True
        fork = await original.fork()
        assert fork.origin == "replayed"
        assert await played(fork, ["down"]) == await played(original, ["down"])

    with_pool(work)


def test_a_fork_survives_the_original_and_the_death_of_its_host() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open(*LAKE)
        await original.reset()
        await played(original, ["right"])
        fork = await original.fork()
        twin = await original.fork()
        await original.close()
        hosts[0].dead = True
        assert await played(fork, ["down", "left"]) == await played(twin, ["down", "left"])

    with_pool(work)


def test_a_fork_before_the_reset_is_a_second_episode() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open(*LAKE)
        fork = await original.fork()
        assert await fork.reset() == await original.reset()

    with_pool(work)


def test_a_fork_waits_for_a_place_and_a_cancelled_one_gives_its_own_back() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original, other = await pool.open(*LAKE), await pool.open(*LAKE)
        await original.reset()
        waiting = asyncio.create_task(original.fork())
        await asyncio.sleep(0)
        assert not waiting.done()
        await other.close()
        fork = await asyncio.wait_for(waiting, 5)
        await fork.close()
        cancelled = asyncio.create_task(original.fork())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.wait_for(original.fork(), 5)
        assert len(hosts[0].table._episodes) == 2

    with_pool(work, episodes_per_host=2)


def test_an_episode_that_failed_cannot_be_forked_and_costs_no_place() -> None:
    async def work(pool: EnvironmentPool, hosts: list[TableHost]) -> None:
        original = await pool.open("frozen_lake", {}, 0)
        with pytest.raises(EnvironmentFailure, match="reset the frozen lake"):
            await original.step("down")
        for _ in range(5):
            with pytest.raises(EnvironmentFailure, match="reset the frozen lake"):
                await original.fork()

    with_pool(work, episodes_per_host=2)


@pytest.mark.slow
@pytest.mark.processes
def test_a_fork_that_comes_out_different_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def run() -> None:
        async with EnvironmentPool(
            factory=SubprocessHost.start,
            num_hosts=2,
            episodes_per_host=1,
            step_timeout_s=30.0,
            reset_timeout_s=30.0,
        ) as pool:
            original = await pool.open("hostile_environments:Unreproducible", {}, 0)
            await original.reset()
            await original.step("hello")
            with pytest.raises(EnvironmentFailure, match="not reproducible") as caught:
                await original.fork()
            assert caught.value.kind == "died"
            await original.step("still here")

    asyncio.run(run())
