"""Generated text adventures. Run by `make test-envs`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.envs.registry import ENVIRONMENTS, make
from interlace.envs.snapshot import copied
from interlace.envs.textworld_game import GAMES, TextWorldGame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS: dict[str, dict[str, Any]] = {
    "coin_collector": {"level": 3},
    "cooking": {"recipe": 2, "take": 1, "go": 6, "open": True},
    "simple": {"rewards": "balanced", "goal": "brief"},
    "treasure_hunter": {"level": 5},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[TextWorldGame]:
    """One game for many tests, which play on copies of it."""
    env = TextWorldGame(settings={"level": 3}, choices=True)
    env.reset(seed=1)
    yield env
    env.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def solved(env: TextWorldGame) -> list[Any]:
    """What the game's own plan leads to."""
    return [env.step(command) for command in list(env._state.policy_commands)]


def test_gymnasium_finds_nothing_to_complain_about() -> None:
    spec = EnvSpec(id="Text-v0", entry_point=ENVIRONMENTS["textworld"], kwargs={})
    check_env(gymnasium.make(spec).unwrapped)


@pytest.mark.parametrize("game", sorted(GAMES))
def test_a_seed_makes_a_game_that_its_plan_wins(game: str, folder: Path) -> None:
    env = TextWorldGame(game=game, settings=SETTINGS[game])
    text, info = env.reset(seed=3)
    assert text in env.observation_space
    assert "-= " in text
    assert "$$" not in text
    assert info == {"score": 0}
    outcomes = solved(env)
    *_, (last, _, terminated, truncated, end) = outcomes
    assert last.endswith("The End.")
    assert (terminated, truncated, end["success"]) == (True, False, True)
    assert sum(outcome[1] for outcome in outcomes) == pytest.approx(1.0)
    assert all(outcome[4]["valid_action"] for outcome in outcomes)
    assert list(folder.iterdir()) == [], "an episode that is over leaves no file"
    again = TextWorldGame(game=game, settings=SETTINGS[game])
    assert again.reset(seed=3) == (text, info)
    assert solved(again) == outcomes
    assert again.reset(seed=4)[0] != text
    again.close()


def test_admissible_commands_are_offered_as_choices(collector: TextWorldGame) -> None:
    env = collector.copy()
    outcome = env.step("look")
    assert set(env._state.policy_commands) & set(outcome[4]["choices"])
    assert outcome[4]["valid_action"]
    env.close()


@pytest.mark.parametrize(
    ("reply", "shown", "valid"),
    [
        ("\n look \nquit", "-= ", True),
        ("look. quit", "-= ", True),
        ("look, then take coin", "-= ", True),
        ("frobnicate", "That's not a verb I recognise.", False),
        ("take \u1234", "You can't see any such thing.", False),
        ("go " * 3000, "", False),
        ("", "Say a command of the game.", False),
        ("...", "Say a command of the game.", False),
        ("QUIT", "Say a command of the game.", False),
        ("restart", "Say a command of the game.", False),
        ("save", "Say a command of the game.", False),
        ("undo", "Say a command of the game.", False),
        ("tw-print score", "Say a command of the game.", False),
    ],
)
def test_a_reply_is_one_command_of_the_game(
    reply: str, shown: str, valid: bool, collector: TextWorldGame
) -> None:
    env = collector.copy()
    text, reward, terminated, truncated, info = env.step(reply)
    assert shown in text
    assert "=-0/" not in text
    assert (reward, terminated, truncated, info["valid_action"]) == (0.0, False, False, valid)
    env.close()


@settings(max_examples=40, deadline=None)
@given(replies=st.lists(st.text() | st.text("gotake.,;\"'\x00\ud800 \n"), max_size=4))
def test_no_text_is_too_strange(replies: list[str], collector: TextWorldGame) -> None:
    env = collector.copy()
    for reply in replies:
        outcome = env.step(reply)
        assert outcome[0] in env.observation_space
        if outcome[2] or outcome[3]:
            break
    env.close()


def test_copies_go_their_own_ways_and_outlive_the_original(folder: Path) -> None:
    env = TextWorldGame(settings={"level": 3})
    env.reset(seed=1)
    first, *rest = list(env._state.policy_commands)
    env.step(first)
    one: Any = copied(env)
    env.close()
    two = copied(one)
    assert two is not None
    outcomes = [one.step(command) for command in rest]
    assert outcomes[-1][2]
    assert two.step("frobnicate")[0] == "That's not a verb I recognise."
    assert [two.step(command)[:3] for command in rest] == [outcome[:3] for outcome in outcomes]
    assert list(folder.iterdir()) == []


def test_episodes_are_cut_after_max_steps_and_need_a_reset_then(folder: Path) -> None:
    env = TextWorldGame(max_steps=3)
    env.reset(seed=0)
    assert [env.step("hm")[3] for _ in range(3)] == [False, False, True]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("look")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        ({"game": "zork"}, "no game 'zork': choose one of coin_collector, cooking"),
        ({"settings": {"levels": 3}}, "coin_collector has no setting 'levels', only level"),
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("textworld", params)


def test_a_level_that_does_not_exist_is_refused_by_the_reset(folder: Path) -> None:
    env = make("textworld", {"settings": {"level": 301}})
    with pytest.raises(ValueError, match="1-300"):
        env.reset(seed=0)
    assert list(folder.iterdir()) == []
