"""Which variables an environment sees, however its process was started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from interlace.envs.host import EnvironmentHost, SubprocessHost
from interlace.envs.variables import present
from interlace.rollout.config import Environments
from interlace.rollout.environments import EnvironmentPool
from interlace.rollout.launch.environment_actor import EnvironmentActor

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SEEN = {
    "GAME_SERVER": "somewhere",
    "OTHER_SECRET": "not set",
    "PYTHONHASHSEED": "0",
    "NOT_SET_HERE": "not set",
}


async def local(index: int) -> EnvironmentHost:
    names = Environments(pass_env=("GAME_SERVER", "PYTHONHASHSEED", "NOT_SET_HERE")).pass_env
    return await SubprocessHost.start(variables=present(names))


async def remote(index: int) -> EnvironmentHost:
    actor = EnvironmentActor()
    await actor.open(json.dumps({"GAME_SERVER": "somewhere", "PYTHONHASHSEED": "7"}))
    return actor._host


@pytest.mark.parametrize("factory", [local, remote])
def test_an_environment_sees_a_short_list_and_what_it_was_given(
    factory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("GAME_SERVER", "somewhere")
    monkeypatch.setenv("OTHER_SECRET", "secret")
    monkeypatch.setenv("PYTHONHASHSEED", "7")

    async def run() -> None:
        async with EnvironmentPool(
            factory=factory,  # type: ignore[arg-type]
            num_hosts=1,
            episodes_per_host=1,
            step_timeout_s=30.0,
            reset_timeout_s=30.0,
        ) as pool:
            episode = await pool.open("hostile_environments:Looks", {}, 0)
            await episode.reset()
            assert {name: (await episode.step(name)).text for name in SEEN} == SEEN

    asyncio.run(run())


def test_names_of_variables_come_without_values() -> None:
    with pytest.raises(ValueError, match=r"'KEY=7' is no name of a variable"):
        Environments(pass_env=("KEY=7",))
