"""Whatever one environment does, its neighbours end as if it had never been."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from interlace.envs.registry import make
from interlace.rollout.environments import (
    EnvironmentFailure,
    EnvironmentPool,
    Episode,
    HostStartError,
    StepOutcome,
    SubprocessHost,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MEMORY_BYTES = 512 * 1024**2
LAKE = ("frozen_lake", {"is_slippery": True, "random_map": True, "size": 6}, 7)
CAVE = ("colossal_cave", {}, 11)
LAKE_ACTIONS = ["right", "down", "nonsense", "right", "down", "left"]
CAVE_ACTIONS = ["in", "take lamp", "look", "out", "inventory", "down"]


@pytest.fixture(autouse=True)
def _hostile_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def host(index: int) -> SubprocessHost:
    return await SubprocessHost.start(index, memory_bytes=MEMORY_BYTES)


def a_pool(step_timeout_s: float = 20.0, **changes: Any) -> EnvironmentPool:
    settings: dict[str, Any] = {
        "factory": host,
        "num_hosts": 1,
        "episodes_per_host": 4,
        "step_timeout_s": step_timeout_s,
        "reset_timeout_s": 30.0,
    }
    return EnvironmentPool(**settings | changes)


def alone(env: str, params: dict[str, Any], seed: int, actions: Iterable[str]) -> list[Any]:
    """What an episode sees without a pool, a process or neighbours."""
    environment = make(env, params)
    seen: list[Any] = [environment.reset(seed=seed)[0]]
    for action in actions:
        text, reward, terminated, truncated, info = environment.step(action)
        seen.append((text, reward, terminated, truncated, info))
        if terminated or truncated:
            break
    return seen


class Neighbour:
    """An honest episode in the pool, driven in two halves around somebody else's mishap."""

    def __init__(self, episode: Episode, actions: list[str]) -> None:
        self.episode = episode
        self.actions = actions
        self.seen: list[Any] = []

    async def begin(self) -> None:
        self.seen.append((await self.episode.reset()).text)
        await self.advance(2)

    async def advance(self, count: int) -> None:
        for _ in range(count):
            done = len(self.seen) - 1
            if done >= len(self.actions) or (done and any(self.seen[-1][2:4])):
                return
            o = await self.episode.step(self.actions[done])
            self.seen.append((o.text, o.reward, o.terminated, o.truncated, dict(o.info)))


async def among_neighbours(pool: EnvironmentPool, mishap: Callable[[EnvironmentPool], Any]) -> Any:
    """Run `mishap` between the halves of two honest episodes, which must not notice."""
    lake = Neighbour(await pool.open(*LAKE), LAKE_ACTIONS)
    cave = Neighbour(await pool.open(*CAVE), CAVE_ACTIONS)
    await lake.begin()
    await cave.begin()
    result = await mishap(pool)
    await asyncio.gather(lake.advance(99), cave.advance(99))
    assert lake.seen == alone(*LAKE, LAKE_ACTIONS)
    assert cave.seen == alone(*CAVE, CAVE_ACTIONS)
    await lake.episode.close()
    await cave.episode.close()
    return result


async def provoke(pool: EnvironmentPool, name: str, **params: Any) -> StepOutcome:
    async with await pool.open(f"hostile_environments:{name}", params, 0) as episode:
        await episode.reset()
        await episode.step("wait")
        try:
            return await episode.step("now")
        except EnvironmentFailure as failure:
            with pytest.raises(EnvironmentFailure, match=re.escape(str(failure))):
                await episode.step("wait")
            raise


def failure_of(name: str, **changes: Any) -> EnvironmentFailure:
    async def run() -> EnvironmentFailure:
        async def mishap(pool: EnvironmentPool) -> EnvironmentFailure:
            with pytest.raises(EnvironmentFailure) as caught:
                await provoke(pool, name)
            return caught.value

        async with a_pool(**changes) as pool:
            failure: EnvironmentFailure = await among_neighbours(pool, mishap)
            return failure

    return asyncio.run(run())


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("RaisesInConstructor", "raised", "ValueError: not today"),
        ("RaisesInReset", "raised", "KeyError: 'no such level'"),
        ("Raises", "raised", "RuntimeError: broken"),
        ("RaisesUnprintable", "raised", "Nasty: (an error without readable text)"),
        ("SysExit", "raised", "SystemExit"),
        ("Interrupts", "raised", "KeyboardInterrupt"),
        ("NoSuchClass", "raised", "has no class NoSuchClass"),
        ("ReturnsBytes", "invalid", "not bytes"),
        ("ReturnsNone", "invalid", "not NoneType"),
        ("ReturnsSurrogate", "invalid", "UTF-8"),
        ("ReturnsTooMuch", "invalid", "2097152 bytes"),
        ("ReturnsNan", "invalid", "finite"),
        ("ReturnsHugeReward", "invalid", "finite"),
        ("ReturnsTextReward", "invalid", "a reward is a number, not str"),
        ("ReturnsNoFlag", "invalid", "terminated is a bool"),
        ("ReturnsFour", "invalid", "not 4 values"),
        ("ReturnsNothing", "invalid", "not NoneType"),
        ("ReturnsListInfo", "invalid", "info is a dict"),
        ("ReturnsBadChoices", "invalid", "choices"),
        ("OsExit", "died", "status 3"),
        ("Segfault", "died", "SIGSEGV"),
        ("KillsItsParent", "died", "SIGKILL"),
        ("KillsItsGroup", "died", "SIGKILL"),
        ("ClosesEverything", "died", "the environment process"),
    ],
)
def test_a_mishap_is_reported_and_neighbours_do_not_notice(
    name: str, kind: str, words: str
) -> None:
    failure = failure_of(name)
    assert failure.kind == kind
    assert words in failure.message


@pytest.mark.parametrize("name", ["Sleeps", "IgnoresSignals", "StopsItsParent"])
def test_a_hang_ends_at_its_deadline_and_neighbours_are_replayed(name: str) -> None:
    failure = failure_of(name, step_timeout_s=1.0)
    assert failure.kind == "hung"
    assert "step took more than 1 s" in failure.message


def test_a_reset_that_hangs_ends_at_its_deadline() -> None:
    assert failure_of("HangsInReset", reset_timeout_s=2.0).kind == "hung"


def test_memory_without_end_is_bounded() -> None:
    failure = failure_of("Allocates")
    assert failure.kind in ("raised", "died")


@pytest.mark.parametrize(
    ("name", "text"), [("Prints", "/dev/null /dev/null /dev/null"), ("ReturnsTwice", "fine")]
)
def test_noise_and_forks_damage_nothing(name: str, text: str) -> None:
    async def run() -> StepOutcome:
        async with a_pool() as pool:
            outcome: StepOutcome = await among_neighbours(pool, lambda pool: provoke(pool, name))
            return outcome

    assert asyncio.run(run()).text == text


def test_a_close_that_hangs_frees_its_place() -> None:
    async def run() -> None:
        async with a_pool(step_timeout_s=1.0) as pool:

            async def mishap(pool: EnvironmentPool) -> None:
                episode = await pool.open("hostile_environments:HangsInClose", {}, 0)
                await episode.reset()
                await episode.close()

            await among_neighbours(pool, mishap)

    asyncio.run(run())


def test_a_missing_module_is_named() -> None:
    async def run() -> None:
        async with a_pool() as pool:
            with pytest.raises(EnvironmentFailure, match=r"No module named 'no_such_package'"):
                await pool.open("no_such_package.envs:Env", {}, 0)
            with pytest.raises(EnvironmentFailure, match=r"babyai, colossal_cave, "):
                await pool.open("frozen_like", {}, 0)

    asyncio.run(run())


def test_an_episode_that_differs_when_replayed_fails_and_says_so() -> None:
    async def run() -> None:
        async with a_pool() as pool:
            fickle = await pool.open("hostile_environments:Unreproducible", {}, 0)
            await fickle.reset()
            await fickle.step("hello")
            with pytest.raises(EnvironmentFailure, match="status 3"):
                await among_neighbours(pool, lambda pool: provoke(pool, "OsExit"))
            with pytest.raises(EnvironmentFailure, match="not reproducible") as caught:
                await fickle.step("hello")
            assert caught.value.kind == "died"

    asyncio.run(run())


def test_a_replay_that_ends_the_process_fails_that_episode_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with a_pool() as pool:
            params = {"path": str(tmp_path / "steps")}
            cursed = await pool.open("hostile_environments:DiesWhenReplayed", params, 0)
            await cursed.reset()
            await cursed.step("hello")

            async def mishap(pool: EnvironmentPool) -> None:
                with pytest.raises(EnvironmentFailure, match="status 3"):
                    await provoke(pool, "OsExit")
                with pytest.raises(EnvironmentFailure, match="status 4"):
                    await cursed.step("hello")
                await cursed.close()

            await among_neighbours(pool, mishap)

    asyncio.run(run())


@pytest.mark.parametrize("exits", [True, False])
def test_children_and_daemons_end_with_their_host(exits: bool, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    hosts: list[int] = []

    async def counted(index: int) -> SubprocessHost:
        started = await host(index)
        hosts.append(started.pid)
        return started

    async def run() -> None:
        async with a_pool(factory=counted) as pool:
            work = provoke(pool, "LeavesChildren", path=str(path), exits=exits)
            if exits:
                with pytest.raises(EnvironmentFailure, match="status 3"):
                    await work
            else:
                await work

    asyncio.run(run())
    children = list(map(int, path.read_text().split()))
    assert len(children) == 3
    assert not any(map(alive, children + hosts))


def test_temporary_files_end_with_their_host() -> None:
    async def run() -> Path:
        async with a_pool() as pool:
            folder = Path((await provoke(pool, "LeavesFiles")).text)
            assert (folder / "file").exists()
        return folder

    folder = asyncio.run(run())
    assert not folder.exists()
    assert not folder.parent.exists()


def test_a_killed_caller_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    script = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from interlace.rollout.environments import EnvironmentPool, SubprocessHost
async def main():
    started = []
    async def factory(index):
        started.append(await SubprocessHost.start(index))
        return started[-1]
    async with EnvironmentPool(factory=factory, num_hosts=2, episodes_per_host=1,
                               step_timeout_s=60, reset_timeout_s=60) as pool:
        params = {{"path": {str(path)!r}, "exits": False}}
        first = await pool.open("hostile_environments:LeavesChildren", params, 0)
        await first.reset()
        await first.step("now")
        second = await pool.open("hostile_environments:IgnoresSignals", {{}}, 0)
        await second.reset()
        stuck = asyncio.create_task(second.step("now"))
        await asyncio.sleep(0.2)
        print(*(host.pid for host in started), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = list(map(int, ended.stdout.split() + path.read_text().split()))
    assert len(pids) == 5
    assert all_end(pids, within_s=10.0)


def test_a_python_that_cannot_start_is_a_clear_error_after_three_tries() -> None:
    tries: list[int] = []

    async def factory(index: int) -> SubprocessHost:
        tries.append(index)
        return await SubprocessHost.start(index, python="/bin/false")

    async def run() -> None:
        with pytest.raises(HostStartError, match=r"did not start in 3 tries.*status 1"):
            async with a_pool(factory=factory):
                raise AssertionError("unreachable")

    asyncio.run(run())
    assert tries == [0, 0, 0]


def test_closing_the_pool_ends_running_steps_within_two_seconds() -> None:
    async def run() -> float:
        pool = a_pool(step_timeout_s=60.0, num_hosts=2, episodes_per_host=1)
        async with pool:
            steps = []
            for name in ("Sleeps", "IgnoresSignals"):
                episode = await pool.open(f"hostile_environments:{name}", {}, 0)
                await episode.reset()
                steps.append(asyncio.create_task(episode.step("now")))
            waiting = asyncio.create_task(pool.open(*LAKE))
            await asyncio.sleep(0.2)
            began = time.monotonic()
        results = await asyncio.gather(*steps, waiting, return_exceptions=True)
        for result in results:
            assert isinstance(result, EnvironmentFailure)
            assert "the environment pool was closed" in str(result)
        return time.monotonic() - began

    assert asyncio.run(run()) < 2.0
