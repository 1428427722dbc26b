from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from interlace.rollout.digest import digest
from interlace.rollout.trajectory import EndReason, Ledger, Source, Trajectory, Turn


def experts(num: int, fill: int = 1) -> np.ndarray:
    return np.full((num, 2, 3), fill, np.uint8)


def turn(start: int, stop: int, reward: float = 0.0) -> Turn:
    return Turn(
        reward=reward,
        start=start,
        stop=stop,
        finish="stop",
        valid_action=True,
        text="go",
        cached_tokens=0,
        prefill_tokens=start,
    )


def two_turns(trajectory_id: int = 3, **changes: object) -> Trajectory:
    ledger = Ledger()
    ledger.append_given([9, 10, 11], [Source.TEMPLATE, Source.PROMPT, Source.TEMPLATE], 0)
    ledger.append_sampled([20, 21], [-1.5, -0.25], [-1.0, -0.125], [4, 4], [4, 4], 0)
    ledger.set_experts(0, experts(4))
    ledger.append_given([30], Source.OBSERVATION, 1)
    ledger.append_sampled([22], [-2.0], [-0.5], [4], [4], 1)
    ledger.set_experts(4, experts(2, fill=7))
    trajectory = Trajectory.from_ledger(
        ledger,
        trajectory_id=trajectory_id,
        task_id="task",
        group_id=None,
        env="door",
        seed=1,
        turns=(turn(3, 5, 0.5), turn(6, 7, 1.0)),
        end_reason=EndReason.TERMINATED,
        info={"success": True},
    )
    return replace(trajectory, **changes)


def test_a_ledger_keeps_every_column_in_step():
    trajectory = two_turns()
    assert trajectory.token_ids.tolist() == [9, 10, 11, 20, 21, 30, 22]
    assert trajectory.source.tolist() == [3, 0, 3, 1, 1, 2, 1]
    assert trajectory.turn.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert trajectory.version.tolist() == [-1, -1, -1, 4, 4, -1, 4]
    assert np.isnan(trajectory.logprob).tolist() == (~trajectory.loss_mask).tolist()
    assert trajectory.logprob_raw[3:5].tolist() == [-1.5, -0.25]


def test_the_last_sampled_token_has_no_experts():
    trajectory = two_turns()
    assert trajectory.experts_known == trajectory.num_tokens - 1
    assert trajectory.experts[:4].tolist() == experts(4).tolist()
    assert trajectory.experts[4:6].tolist() == experts(2, fill=7).tolist()
    assert not trajectory.experts[6].any()


def test_masks_spans_and_returns_are_derived():
    trajectory = two_turns()
    assert trajectory.return_ == 1.5
    assert trajectory.num_turns == 2
    assert trajectory.sampled_tokens == 3
    assert [trajectory.token_ids[span].tolist() for span in trajectory.spans] == [[20, 21], [22]]
    mask = np.zeros(trajectory.num_tokens, bool)
    for span in trajectory.spans:
        mask[span] = True
    assert mask.tolist() == trajectory.loss_mask.tolist()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda ledger: ledger.append_given([1], Source.SAMPLED, 1), "append_sampled"),
        (lambda ledger: ledger.append_given([1, 2], [Source.PROMPT], 1), "2 tokens but 1 sources"),
        (lambda ledger: ledger.append_given([-1], Source.PROMPT, 1), "negative"),
        (lambda ledger: ledger.append_given([1 << 31], Source.PROMPT, 1), "does not fit"),
        (lambda ledger: ledger.append_given([1], Source.PROMPT, 0), "turn 0 after turn 1"),
        (lambda ledger: ledger.append_sampled([1], [], [0.0], [0], [0], 1), "0 logprobs_raw"),
        (lambda ledger: ledger.append_sampled([1], [0.0], [math.nan], [0], [0], 1), "is NaN"),
        (lambda ledger: ledger.set_experts(1, experts(1)), "neither overwrite nor gap"),
        (lambda ledger: ledger.set_experts(3, experts(1)), "neither overwrite nor gap"),
        (lambda ledger: ledger.set_experts(2, experts(3)), "position 5 of 4"),
        (lambda ledger: ledger.set_experts(2, np.zeros((1, 2, 4), np.uint8)), r"\(2, 4\) after"),
        (lambda ledger: ledger.set_experts(2, np.zeros((1, 2, 3), np.int64)), "must be uint8"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(misuse, message):
    ledger = Ledger()
    ledger.append_given([5, 6, 7, 8], Source.PROMPT, 1)
    ledger.set_experts(0, experts(2))
    before = {name: np.copy(column) for name, column in ledger.columns().items()}
    with pytest.raises(ValueError, match=message):
        misuse(ledger)
    for name, column in ledger.columns().items():
        assert np.array_equal(before[name], column, equal_nan=name.startswith("logprob"))


def test_what_a_ledger_gives_out_does_not_change_with_it():
    ledger = Ledger()
    ledger.append_given([1], Source.PROMPT, 0)
    token_ids, block = ledger.token_ids, experts(1)
    ledger.set_experts(0, block)
    token_ids.append(2)
    block[:] = 9
    assert ledger.token_ids == [1]
    assert ledger.columns()["experts"].tolist() == experts(1).tolist()


def test_a_trajectory_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        two_turns().token_ids[0] = 1


def test_log_probabilities_keep_their_float32_bits():
    value = np.float32(-0.1)
    ledger = Ledger()
    ledger.append_sampled([1], [float(value)], [float(value)], [0], [0], 0)
    assert ledger.columns()["logprob"].tobytes() == value.tobytes()


def test_a_token_that_saw_older_keys_is_not_exact():
    trajectory = two_turns()
    assert trajectory.exact
    older = trajectory.kv_version.copy()
    older[6] = 3
    assert not replace(trajectory, kv_version=older).exact


def test_rewards_are_replaced_per_turn_or_at_the_end():
    trajectory = two_turns()
    assert [turn.reward for turn in trajectory.with_rewards([2, 3]).turns] == [2.0, 3.0]
    assert [turn.reward for turn in trajectory.with_rewards(7).turns] == [0.0, 7.0]
    assert trajectory.with_rewards(np.float32(7)).return_ == 7.0
    assert trajectory.return_ == 1.5


@pytest.mark.parametrize(("rewards", "message"), [([1.0], "1 rewards for 2"), (math.nan, "finite")])
def test_rewards_that_do_not_fit_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        two_turns().with_rewards(rewards)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": np.zeros(6, np.uint8)}, r"source must be uint8 \[7\]"),
        ({"version": np.zeros(7, np.int64)}, "version must be int32"),
        ({"experts_known": 8}, "8 known rows"),
        ({"turns": (turn(3, 9),)}, "turn 0 spans 3 to 9 of 7"),
        ({"turns": (turn(3, 5), turn(4, 6))}, "turn 1 spans 4 to 6 of 7 tokens, after 5"),
        ({"info": {"x": object()}}, "info is not a JSON value"),
    ],
)
def test_a_trajectory_that_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        two_turns(**changes)


def test_trajectories_are_equal_bit_for_bit():
    assert two_turns() == two_turns()
    assert two_turns() != two_turns(seed=2)
    minus_zero = two_turns().logprob.copy()
    minus_zero[3] = -0.0
    zero = minus_zero.copy()
    zero[3] = 0.0
    assert two_turns(logprob=zero) != two_turns(logprob=minus_zero)


def test_a_digest_does_not_depend_on_order_rewards_or_turns_texts():
    one, two = two_turns(1), two_turns(2)
    assert digest([one, two]) == digest([two, one.with_rewards(9.0)])


@pytest.mark.parametrize("name", ["token_ids", "logprob", "logprob_raw", "experts"])
def test_a_digest_changes_with_the_last_bit(name):
    trajectory = two_turns()
    changed = getattr(trajectory, name).copy()
    changed[4:5].view(np.uint8).reshape(-1)[0] ^= 1
    assert digest([trajectory]) != digest([replace(trajectory, **{name: changed})])


def test_a_digest_covers_id_and_end_and_ignores_rows_without_meaning():
    trajectory = two_turns()
    padding = trajectory.experts.copy()
    padding[6] = 5
    assert digest([trajectory]) == digest([replace(trajectory, experts=padding)])
    assert digest([trajectory]) != digest([two_turns(4)])
    assert digest([trajectory]) != digest([two_turns(end_reason=EndReason.TRUNCATED)])


def test_a_digest_leaves_aborted_trajectories_out():
    aborted = two_turns(9, end_reason=EndReason.ABORTED)
    assert digest([two_turns(), aborted]) == digest([two_turns()])
    with pytest.raises(ValueError, match="says nothing"):
        digest([aborted])


def test_a_digest_over_nothing_or_one_id_twice_is_refused():
    with pytest.raises(ValueError, match="says nothing"):
        digest([])
    with pytest.raises(ValueError, match="id 3 occurs twice"):
        digest([two_turns(), two_turns()])
