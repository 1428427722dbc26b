"""BabyAI as text: what is described is there, and what is asked for can be done."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.envs.registration import registry
from minigrid.core.world_object import Ball, Box, Door, Key, Lava
from minigrid.utils.baby_ai_bot import BabyAIBot

from interlace.envs.babyai import ACTIONS, BabyAIText

LEVELS = ["BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0", "BabyAI-UnlockLocal-v0"]


def advised(level: str, seed: int) -> list[Any]:
    """What the level's oracle leads to, told in words."""
    env = BabyAIText(level=level)
    seen: list[Any] = [env.reset(seed=seed)]
    bot = BabyAIBot(env._grid)
    action = None
    while len(seen) == 1 or not any(seen[-1][2:4]):
        action = bot.replan(action)
        seen.append(env.step(f"I think I should {ACTIONS[int(action)]}."))
    return seen


@pytest.mark.parametrize("level", LEVELS)
def test_an_oracle_accomplishes_missions_in_words(level: str) -> None:
    for seed in range(5):
        *_, (text, reward, terminated, _, info) = advised(level, seed)
        assert text == "Mission accomplished."
        assert 0 < reward <= 1
        assert terminated
        assert info["success"]


def a_corner() -> BabyAIText:
    """The agent faces west in the east of an empty room, before some things."""
    env = BabyAIText(level="MiniGrid-Empty-8x8-v0")
    env.reset(seed=0)
    grid = env._grid
    grid.agent_pos, grid.agent_dir = (6, 3), 2
    grid.put_obj(Ball("red"), 4, 3)
    grid.put_obj(Key("blue"), 6, 2)
    grid.put_obj(Door("grey", is_locked=True), 4, 1)
    grid.put_obj(Lava(), 5, 5)
    return env


def test_things_are_placed_by_steps_ahead_and_to_the_side_the_nearest_first() -> None:
    env = a_corner()
    assert env.step("look around")[0].startswith("Say turn left, turn right")
    assert env.step("toggle")[0] == (
        "Facing west. Free: 1 ahead, 3 left, 0 right. Carrying: nothing. "
        "You see: blue key 1 right; red ball 2 ahead; green goal 3 left; lava 1 ahead 2 left; "
        "locked grey door 2 ahead 2 right."
    )
    env.step("turn right")
    assert "Carrying: blue key." in env.step("pick up")[0]
    assert "Facing west." in env.step("go forward; no: turn right; no, turn left")[0]


def test_the_state_of_a_door_is_said() -> None:
    env = a_corner()
    env._grid.put_obj(Door("green"), 5, 3)
    assert "closed green door 1 ahead" in env.step("drop")[0]
    assert "open green door 1 ahead" in env.step("toggle")[0]


def test_what_a_box_holds_is_seen_once_it_is_opened() -> None:
    env = a_corner()
    env._grid.put_obj(Box("yellow", contains=Key("purple")), 5, 3)
    assert "yellow box 1 ahead" in env.step("drop")[0]
    assert "purple key 1 ahead" in env.step("toggle")[0]


def test_lava_fails_the_mission() -> None:
    env = a_corner()
    env._grid.put_obj(Lava(), 5, 3)
    text, reward, terminated, _, info = env.step("forward")
    assert (text, reward, terminated, info["success"]) == ("Mission failed.", 0.0, True, False)


def test_a_level_with_three_actions_offers_and_takes_three() -> None:
    env = BabyAIText(level="MiniGrid-Dynamic-Obstacles-5x5-v0")
    text, info = env.reset(seed=0)
    assert info["choices"] == list(ACTIONS[:3])
    assert "turn left, turn right or go forward" in text
    assert not env.step("toggle")[4]["valid_action"]


def test_a_level_has_its_own_limit_unless_another_is_given() -> None:
    env = BabyAIText(level="MiniGrid-Empty-5x5-v0")
    env.reset(seed=0)
    num_steps = 1
    while not env.step("hm")[3]:
        num_steps += 1
    assert num_steps == env._grid.max_steps


def test_an_unknown_level_is_answered_with_its_like() -> None:
    with pytest.raises(ValueError, match=r"BabyAI-GoToLokal-v0.*mean BabyAI-GoToLocal-v0"):
        BabyAIText(level="BabyAI-GoToLokal-v0")
    with pytest.raises(ValueError, match="there is no level 'CartPole-v1'"):
        BabyAIText(level="CartPole-v1")


@pytest.mark.slow
def test_every_level_can_be_played(capfd: pytest.CaptureFixture[str]) -> None:
    levels = [name for name in registry if name.startswith(("BabyAI-", "MiniGrid-"))]
    levels = [name for name in levels if "WFC" not in name]  # those need more packages
    assert len(levels) > 150
    for level in levels:
        env = BabyAIText(level=level)
        text, _ = env.reset(seed=0)
        assert text in env.observation_space
        for action in ACTIONS:
            outcome = env.step(action)
            assert outcome[0] in env.observation_space
            if outcome[2] or outcome[3]:
                break
