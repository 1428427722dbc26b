"""The small trainer: its vocabulary, its batches, its loss, and the routing it replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.experiments.lake_episodes import episode

from interlace.envs.frozen_lake import DIRECTIONS, FrozenLakeText
from interlace.experiments.grpo.batch import Batch, batch_of
from interlace.experiments.grpo.gap import gap_by_lag
from interlace.experiments.grpo.lake_model import (
    ACTIONS,
    UNKNOWN,
    VOCAB_SIZE,
    VOCABULARY,
    action_choices,
    lake_tokenizer,
    write_lake_model,
)
from interlace.experiments.grpo.learner import Learner, Logprobs, Recipe, advantages, grpo_loss
from interlace.experiments.grpo.routing import replayed
from interlace.rollout import Trajectory
from interlace.rollout.chat import Chat

RECIPE = Recipe()


@pytest.fixture(scope="module")
def lake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lake_model(tmp_path_factory.mktemp("lake") / "model", seed=0)


@pytest.fixture
def learner(lake_model: Path) -> Learner:
    return Learner(lake_model, RECIPE, replay_routing=False)


def batch(*trajectories: Trajectory) -> Batch:
    return batch_of(trajectories, action_choices(), VOCAB_SIZE)


# ---- the model


def test_everything_said_on_the_lake_is_in_the_vocabulary() -> None:
    tokenizer = lake_tokenizer()
    lake = FrozenLakeText()
    opening, _ = lake.reset(seed=0)
    said = [opening]
    for action in ("down", "down", "right", "right", "down", "left", "right", "right"):
        text, _, terminated, _, _ = lake.step(action)
        said += [] if terminated else [text]
    assert len(said) == 8
    for text in said:
        encoded = tokenizer.encode(text)
        assert UNKNOWN not in encoded.tokens, text
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("Hello").tokens == [UNKNOWN]


def test_an_action_takes_two_tokens_of_which_the_first_decides(lake_model: Path) -> None:
    chat = Chat(lake_model)
    assert tuple(ACTIONS) == DIRECTIONS
    assert tuple(tuple(chat.encode_choice(word)) for word in DIRECTIONS) == action_choices()
    assert {len(choice) for choice in action_choices()} == {2}
    assert len({choice[0] for choice in action_choices()}) == len(DIRECTIONS)
    assert [chat.decode(choice) for choice in action_choices()] == list(DIRECTIONS)
    assert chat.append_only
    assert len(chat.reply("You are at row 1, column 2.", closed=False).token_ids) == 4


def test_the_vocabulary_fits_the_model_and_names_nothing_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= VOCAB_SIZE


def test_a_model_is_the_same_bytes_for_the_same_seed(lake_model: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again = write_lake_model(tmp_path / "again", seed=0)
    other = write_lake_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state), "nobody's random numbers are used up"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (again / file).read_bytes() == (lake_model / file).read_bytes(), file
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (lake_model / weights).read_bytes()


def test_the_model_has_as_many_parameters_as_it_says(learner: Learner) -> None:
    assert sum(value.numel() for value in learner.weights().values()) == 226_112
    assert "226,112" in str(write_lake_model.__doc__)


# ---- batches


def test_only_tokens_that_could_have_been_others_are_learnt_from() -> None:
    made = batch(episode(0, ["left", "up"]), episode(1, ["down"]))
    assert made.token_ids_BT.shape == (2, 11)
    assert made.sampled_BT[0].nonzero().flatten().tolist() == [3, 4, 9, 10]
    assert made.decided_BT[0].nonzero().flatten().tolist() == [3, 9]
    assert made.decided_BT[1].nonzero().flatten().tolist() == [3]
    firsts = sorted(choice[0] for choice in action_choices())
    assert made.allowed_BTV[0, 3].nonzero().flatten().tolist() == firsts
    assert made.allowed_BTV[0, 4].nonzero().flatten().tolist() == [action_choices()[0][1]]
    assert made.allowed_BTV[0, 5].all(), "a given token could have been any"
    assert (made.experts_BTLK[1, 4:] == -1).all(), "the last token went to no expert"
    assert (made.experts_BTLK[1, :4] >= 0).all()


def test_a_turn_that_is_no_choice_is_one_clear_error() -> None:
    others = tuple(choice for choice in action_choices() if choice != action_choices()[0])
    with pytest.raises(ValueError, match="at position 3 goes on with none of"):
        batch_of([episode(0, ["left"])], others, VOCAB_SIZE)
    with pytest.raises(ValueError, match="at least one trajectory"):
        batch()


def test_tokens_are_counted_by_the_version_that_drew_them() -> None:
    made = batch(episode(0, ["left", "up", "up"], versions=[4, 4, 5]), episode(1, ["up"]))
    assert made.tokens_of_version == {0: 2, 4: 4, 5: 2}
    assert made.versions == [0, 4, 5]


# ---- the loss


def test_one_failure_among_many_successes_weighs_little() -> None:
    returns = torch.ones(128)
    returns[5] = 0.0
    one_group = torch.zeros(128, dtype=torch.long)
    assert advantages(returns, one_group, 0.25)[5] > -4.0
    assert advantages(returns, one_group, 1e-6)[5] < -11.0, "what it would weigh without the floor"


def test_returns_are_compared_within_their_group() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 1.0])
    found = advantages(returns, torch.tensor([0, 0, 1, 1]), 0.25)
    assert found.tolist() == [-1.0, 1.0, 0.0, 0.0]


def logprobs_near(made: Batch, ratio: float) -> tuple[Logprobs, torch.Tensor]:
    """What a model says that finds every token `ratio` times as likely as the rollout did."""
    drawn = (made.logprob_BT + math.log(ratio)).requires_grad_()
    zeros = torch.zeros_like(made.logprob_BT)
    return Logprobs(drawn_BT=drawn, raw_BT=zeros, entropy_BT=zeros), drawn


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.0, 1.0, True), (1.3, 1.0, False), (0.7, 1.0, True), (0.7, -1.0, False), (1.3, -1.0, True)],
)
def test_a_token_is_pushed_no_further_than_the_clip(
    ratio: float, advantage: float, moves: bool
) -> None:
    made = batch(episode(0, ["left", "up"]))
    found, drawn = logprobs_near(made, ratio)
    grpo_loss(found, made, torch.tensor([advantage]), RECIPE).backward()
    assert drawn.grad is not None
    pushed = drawn.grad[0].nonzero().flatten().tolist()
    assert pushed == ([3, 9] if moves else [])


def test_the_loss_is_smaller_where_the_policy_is_less_sure() -> None:
    made = batch(episode(0, ["left"]))
    found, _ = logprobs_near(made, 1.0)
    unsure = Logprobs(
        drawn_BT=found.drawn_BT, raw_BT=found.raw_BT, entropy_BT=torch.ones_like(found.raw_BT)
    )
    even = torch.tensor([0.0])
    difference = grpo_loss(found, made, even, RECIPE) - grpo_loss(unsure, made, even, RECIPE)
    assert difference.item() == pytest.approx(RECIPE.entropy_weight)


def test_what_is_rewarded_becomes_likelier(learner: Learner) -> None:
    made = batch(episode(0, ["left"], reward=1.0), episode(1, ["up"]))
    before = learner.logprobs(made).drawn_BT[:, 3].detach()
    learnt = learner.learn(made)
    after = learner.logprobs(made).drawn_BT[:, 3].detach()
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert learnt.grad_norm > 0


def test_log_probabilities_are_those_of_the_allowed_tokens(learner: Learner) -> None:
    made = batch(*(episode(n, [action]) for n, action in enumerate(ACTIONS)))
    found = learner.logprobs(made)
    assert found.drawn_BT[:, 3].exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    assert found.raw_BT[:, 3].exp().sum().item() < 0.5
    assert (found.drawn_BT[:, 4] == 0).all(), "a token that nothing else could be"
    own = -(found.drawn_BT[:, 3].exp() * found.drawn_BT[:, 3]).sum()
    assert found.entropy_BT[0, 3].item() == pytest.approx(own.item(), abs=1e-6)


# ---- routing


def chosen_by(model: Any, token_ids_BT: torch.Tensor) -> list[torch.Tensor]:
    """[layers] of [N, K]: where the experts of every layer receive their rows from."""
    seen: list[torch.Tensor] = []

    def look(experts: Any, inputs: Sequence[Any]) -> None:
        seen.append(inputs[1].clone())

    handles = [layer.mlp.experts.register_forward_pre_hook(look) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=token_ids_BT, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def test_experts_are_those_of_the_rollout_where_they_are_known(learner: Learner) -> None:
    made = batch(episode(0, ["left", "up"]), episode(1, ["down"]))
    model = learner._model
    own = chosen_by(model, made.token_ids_BT)
    with replayed(model, made.experts_BTLK):
        replay = chosen_by(model, made.token_ids_BT)
    for layer in range(2):
        recorded = made.experts_BTLK[:, :, layer].flatten(0, 1)
        known = (recorded >= 0).all(-1)
        assert torch.equal(replay[layer][known], recorded[known])
        if layer == 0:  # behind it the rows are others
            assert torch.equal(replay[layer][~known], own[layer][~known])
    again = chosen_by(model, made.token_ids_BT)
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True)), "it ends with the block"


def test_replaying_a_models_own_choice_changes_no_bit(learner: Learner) -> None:
    made = batch(episode(0, ["left", "up"]))
    model = learner._model
    own = chosen_by(model, made.token_ids_BT)
    experts = torch.stack([layer.unflatten(0, made.token_ids_BT.shape) for layer in own], dim=2)
    with torch.no_grad():
        plain = model(input_ids=made.token_ids_BT, use_cache=False).logits
        with replayed(model, experts):
            same = model(input_ids=made.token_ids_BT, use_cache=False).logits
    assert torch.equal(plain, same)


def test_gradients_reach_the_router_through_a_replay(lake_model: Path) -> None:
    learner = Learner(lake_model, RECIPE, replay_routing=True)
    before = learner.weights()
    learner.learn(batch(episode(0, ["left", "up"], reward=1.0), episode(1, ["down"])))
    gates = [name for name in before if name.endswith("gate.weight")]
    assert len(gates) == 2
    assert all(not torch.equal(before[name], learner.weights()[name]) for name in gates)


# ---- the gap


def test_the_gap_is_told_by_lag_and_against_the_tokens_own_version(learner: Learner) -> None:
    old = learner.weights()
    learner.learn(batch(episode(0, ["left"], reward=1.0), episode(1, ["up"])))
    new = learner.weights()
    mixed = episode(0, ["left", "up", "up"], versions=[0, 1, 1], kv_versions=[0, 0, 1])
    made = batch(mixed)
    found = gap_by_lag(learner, made, [mixed], {0: old, 1: new})
    assert {lag: gap.tokens for lag, gap in found.items()} == {0: 4, 1: 2}
    under_new = learner.logprobs(made, new)
    drawn = (under_new.drawn_BT - made.logprob_BT)[0, [9, 10]].abs().max().item()
    raw = (under_new.raw_BT - made.logprob_raw_BT)[0, [9, 10]].abs().max().item()
    assert found[1].largest == pytest.approx(max(drawn, raw), rel=1e-5)
    with pytest.raises(KeyError):
        gap_by_lag(learner, made, [mixed], {0: old})


def test_comparing_under_given_weights_leaves_the_learners_own_alone(learner: Learner) -> None:
    made = batch(episode(0, ["left"], reward=1.0), episode(1, ["up"]))
    old = learner.weights()
    learner.learn(made)
    moved = learner.weights()
    assert torch.equal(learner.logprobs(made, moved).drawn_BT, learner.logprobs(made).drawn_BT), (
        "the same forward"
    )
    assert not torch.equal(learner.logprobs(made, old).drawn_BT, learner.logprobs(made).drawn_BT)
    assert all(torch.equal(moved[name], value) for name, value in learner.weights().items())
