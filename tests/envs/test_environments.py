"""The shipped environments: gymnasium's contract, seeds, and any text at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.envs.colossal_cave import COMMANDS
from interlace.envs.registry import ENVIRONMENTS, make
from interlace.envs.task import Task

NAMES = ("babyai", "colossal_cave", "frozen_lake", "python", "sqlite")
"""Those that any development environment can run; `extras` has the tests of the others."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("babyai", {}),
    ("babyai", {"level": "MiniGrid-Dynamic-Obstacles-6x6-v0"}),
    ("frozen_lake", {}),
    ("frozen_lake", {"size": 7, "random_map": True, "is_slippery": True}),
    ("sqlite", {}),
    ("python", {}),
    ("colossal_cave", {}),
    ("colossal_cave", {"choices": True, "instructions": True}),
]

REPLIES = {
    "babyai": ["turn left", "I go FORWARD", "hm", "pick up", "Pickup!", "toggle", "done", "drop"],
    "frozen_lake": ["right", "Let me go DOWN.", "hm", "up", "left", "down", "right"],
    "sqlite": [
        "SELECT name FROM customers",
        "Look:\n```sql\nSELECT count(*) AS n FROM orders\n```",
        "SELECT nothing",
        "ANSWER: 12",
    ],
    "python": [
        "x = 7",
        "Look:\n```python\nprint(x * 6)\n{'a', 'b', 'c'}\n```",
        "x / 0",
        "what?",
        "import random\nrandom.random()",
        "object()",
        "ANSWER: 12",
    ],
    "colossal_cave": ["in", "take lamp", "xyzzy", "light lamp", "frobnicate", "w", "quit", "yes"],
}


def play(env: gymnasium.Env[str, str], seed: int | None, replies: list[str]) -> list[Any]:
    seen: list[Any] = [env.reset(seed=seed)]
    for reply in replies:
        outcome = env.step(reply)
        seen.append(outcome)
        assert outcome[0] in env.observation_space
        assert isinstance(outcome[4]["valid_action"], bool)
        if outcome[2] or outcome[3]:
            break
    return seen


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_gymnasium_finds_nothing_to_complain_about(name: str, params: dict[str, Any]) -> None:
    spec = EnvSpec(id="Text-v0", entry_point=ENVIRONMENTS[name], kwargs=params)
    check_env(gymnasium.make(spec).unwrapped)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_a_seed_and_replies_decide_everything(name: str, params: dict[str, Any]) -> None:
    first, second = make(name, params), make(name, params)
    assert play(first, 5, REPLIES[name]) == play(second, 5, REPLIES[name])
    assert play(first, None, REPLIES[name]) == play(second, None, REPLIES[name])
    first.close()
    second.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "python"])
@settings(max_examples=60, deadline=None)
@given(replies=st.lists(st.text() | st.text("answer:` \nselect*from;'\"\\\x00\ud800"), max_size=5))
def test_no_text_is_too_strange(name: str, replies: list[str]) -> None:
    env = make(name, {})
    play(env, 0, replies)
    env.close()


@pytest.mark.parametrize("name", NAMES)
def test_episodes_are_cut_after_max_steps_and_need_a_reset_then(name: str) -> None:
    env = make(name, {"max_steps": 3})
    env.reset(seed=0)
    assert [env.step("???")[3] for _ in range(3)] == [False, False, True]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("???")


@pytest.mark.parametrize("name", NAMES)
def test_impossible_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="max_steps must be at least 1, not 0"):
        make(name, {"max_steps": 0})
    with pytest.raises(TypeError, match="max_step"):
        make(name, {"max_step": 3})


def test_the_lake_is_crossed_by_words() -> None:
    env = make("frozen_lake", {})
    seen = play(env, 0, ["down", "down", "right", "I say: Right!", "down", "right"])
    assert "SFFF\nFHFH\nFFFH\nHFFG" in seen[0][0]
    assert seen[0][1] == {"choices": ["left", "down", "right", "up"]}
    assert [outcome[1] for outcome in seen[1:]] == [0, 0, 0, 0, 0, 1]
    assert seen[-1][0] == "You reached the goal."
    assert seen[-1][2:4] == (True, False)
    assert play(env, 0, ["right", "down"])[-1][0] == "You fell into a hole."


def test_a_lake_without_a_standard_map_asks_for_a_random_one() -> None:
    with pytest.raises(ValueError, match=r"no standard map of size 5.*random_map"):
        make("frozen_lake", {"size": 5})
    env = make("frozen_lake", {"size": 5, "random_map": True})
    assert env.reset(seed=1)[0] != env.reset(seed=2)[0]


def test_every_question_about_the_shop_can_be_answered_with_its_rows() -> None:
    env = make("sqlite", {})
    questions = set()
    for seed in range(60):
        first, _ = env.reset(seed=seed)
        question = first.splitlines()[-2]
        questions.add(" ".join(question.split()[:3]))
        answer = env.unwrapped._task.answer  # type: ignore[attr-defined]
        text, reward, terminated, _, _ = env.step(f"I think\n**ANSWER:** {answer}.")
        assert (text, reward, terminated) == ("Right.", 1.0, True)
    assert len(questions) == 5


@pytest.mark.parametrize(
    ("sql", "shown", "valid"),
    [
        (
            "SELECT 1 AS one, NULL AS none, x'00ff' AS raw",
            "one | none | raw\n1 | NULL | x'00ff'",
            True,
        ),
        ("SELECT id FROM orders", "(more than 20 rows)", True),
        ("SELECT id FROM orders WHERE 0", "(no rows)", True),
        ("PRAGMA table_info(orders)", "quantity", True),
        ("SELECT name FROM sqlite_master", "customers", True),
        ("", "ANSWER:", False),
        ("-- nothing", "ANSWER:", False),
        ("SELECT", "Error: incomplete input", False),
        ("SELECT 1; SELECT 2", "Error: You can only execute one statement", False),
        ("DELETE FROM orders", "Error: not authorized", False),
        ("DROP TABLE orders", "Error: not authorized", False),
        ("CREATE TABLE more (x)", "Error: not authorized", False),
        ("BEGIN", "Error: not authorized", False),
        ("ATTACH '/tmp/x.db' AS x", "Error: not authorized", False),
        ("PRAGMA journal_mode", "Error: not authorized", False),
        ("SELECT load_extension('x')", "Error: not authorized", False),
        ("SELECT random()", "Error: not authorized", False),
        ("SELECT CURRENT_TIMESTAMP", "Error: not authorized", False),
        ("SELECT zeroblob(1000000000)", "Error", False),
        ("SELECT printf('%.*c', 1000000000, 'x')", "Error", False),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c",
            "Error: this query takes too many steps",
            False,
        ),
        ("SELECT count(*) FROM orders a, orders b, orders c, orders d", "too many steps", False),
        ("SELECT 'a\x00b'", "Error", False),
        ("SELECT '\ud800'", "Error", False),
        ("SELECT 'häßlich'", "h??lich", True),
    ],
)
def test_sql_is_answered_with_rows_or_an_error(sql: str, shown: str, valid: bool) -> None:
    env = make("sqlite", {})
    env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step(sql)
    assert shown in text
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"valid_action": valid})


@pytest.mark.parametrize(
    ("answer", "reply", "accepted"),
    [
        ("12", "12.0", True),
        ("1200", "$1,200.", True),
        ("12", "twelve", False),
        ("12", "", False),
        ("Ada", "'ada'.", True),
        ("Ada", "Boris", False),
        ("12", "nan", False),
    ],
)
def test_an_answer_is_compared_by_what_it_means(answer: str, reply: str, accepted: bool) -> None:
    assert Task(question="?", answer=answer).accepts(reply) is accepted


def test_the_cave_pays_for_progress_and_says_what_it_understood() -> None:
    env = make("colossal_cave", {"choices": True})
    actions = ["in", "take lamp", "xyzzy", "light lamp", "frobnicate wildly", "w", "w", "w", "down"]
    seen = play(env, 3, actions)
    assert seen[0][1]["choices"] == list(COMMANDS)
    assert [outcome[4]["valid_action"] for outcome in seen[1:]].count(False) == 1
    assert not seen[5][4]["valid_action"]
    total = sum(outcome[1] for outcome in seen[1:])
    assert total == pytest.approx((seen[-1][4]["score"] - seen[0][1]["score"]) / 350)
    assert total > 0


def test_a_question_of_the_cave_wants_yes_or_no() -> None:
    seen = play(make("colossal_cave", {}), 0, ["quit", "east", "yes"])
    assert seen[2][0] == "Please answer yes or no."
    assert not seen[2][4]["valid_action"]
    assert seen[3][2]


def test_the_cave_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    play(make("colossal_cave", {}), 0, ["save game", "suspend lamp", "pause", "in", "pause lamp"])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_every_pair_of_words_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    env = make("colossal_cave", {"max_steps": 100_000})
    env.reset(seed=0)
    words = sorted({w for w in env.unwrapped._game.vocabulary if isinstance(w, str)})  # type: ignore[attr-defined]
    nouns = ["lamp", "water", "grate", "dwarf", "bear", "say", "north", "bottle", "keys"]
    for setting in ([], ["in", "take lamp", "take keys", "take bottle"]):
        env.reset(seed=0)
        for action in setting:
            env.step(action)
        for word in words:
            for action in [word, *(f"{word} {noun}" for noun in nouns)]:
                text, _, terminated, _, _ = env.step(action)
                assert text
                if terminated:
                    env.reset(seed=0)
    assert capfd.readouterr().out == ""
