from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.rollout.ledgers import closed
from transformers import AutoModelForCausalLM

from interlace.rollout import Rollout, load_config
from interlace.rollout.cache import model_folder
from interlace.rollout.drift_gate import DriftError, DriftGate
from interlace.rollout.mismatch import (
    VersionMismatch,
    logprobs_of_transformers,
    mismatch,
    mismatch_by_lag,
    mismatch_of_transformers,
)
from interlace.rollout.trajectory import Ledger, Source, Trajectory


def sampled(
    logprobs: Sequence[float],
    *,
    versions: Sequence[int] | None = None,
    lags: Sequence[int] | None = None,
) -> Trajectory:
    """Two tokens of prompt, then one for each log-probability."""
    num = len(logprobs)
    versions = [0] * num if versions is None else versions
    lags = [0] * num if lags is None else lags
    ledger = Ledger()
    ledger.append_given([1, 2], Source.PROMPT, 0)
    kv_versions = [version - lag for version, lag in zip(versions, lags, strict=True)]
    drawn = [0.5 * x for x in logprobs]
    ledger.append_sampled([3] * num, logprobs, drawn, versions, kv_versions, 0)
    return closed(ledger)


QUARTERS = [math.log(0.5), math.log(0.5), math.log(0.25), math.log(0.25)]
"""Tokens a, a, b, c, as often as their probabilities 1/2, 1/4, 1/4 say."""
THEIRS = [math.log(0.25), math.log(0.25), math.log(0.25), math.log(0.5)]


def test_estimators_are_exact_where_tokens_come_as_often_as_they_should() -> None:
    (row,) = mismatch([sampled(QUARTERS)], [THEIRS])
    exact = 0.5 * math.log(2) + 0.25 * 0 - 0.25 * math.log(2)
    assert row.k1 == pytest.approx(exact, abs=1e-7)
    assert row.k3 == pytest.approx(exact, abs=1e-7)  # as the mean weight is 1
    assert row.ess == pytest.approx(4**2 / (4 * (0.25 + 0.25 + 1 + 4)))
    assert (row.version, row.lag, row.count) == (0, None, 4)
    assert row.mean == pytest.approx(0.75 * math.log(2), abs=1e-7)
    assert row.max == pytest.approx(math.log(2), abs=1e-7)


def test_estimators_are_the_formulas_of_their_definition() -> None:
    (row,) = mismatch([sampled([-1.0, -2.0])], [[-1.5, -1.0]])
    gaps = [-0.5, 1.0]
    ratios = [math.exp(gap) for gap in gaps]
    assert row.k1 == pytest.approx(-sum(gaps) / 2)
    assert row.k3 == pytest.approx(sum(r - 1 - g for r, g in zip(ratios, gaps, strict=True)) / 2)
    assert row.ess == pytest.approx(sum(ratios) ** 2 / (2 * sum(r * r for r in ratios)))
    assert row.quantiles[0.5] == pytest.approx(0.75)
    assert row.quantiles[0.9] == pytest.approx(0.95)


def test_equal_log_probabilities_are_no_mismatch() -> None:
    trajectory = sampled([-0.25, -3.0])
    (row,) = mismatch([trajectory], [trajectory.logprob_raw])
    assert (row.mean, row.max, row.k1, row.k3, row.ess) == (0, 0, 0, 0, 1)


def test_a_small_gap_keeps_its_digits() -> None:
    (row,) = mismatch([sampled([-1.0])], [[-1.0 + 1e-7]])
    assert row.k3 == pytest.approx(5e-15, rel=1e-3)


def test_every_version_has_a_row_and_every_age_of_keys_and_values() -> None:
    one = sampled([-1.0, -1.0, -1.0], versions=[2, 3, 3], lags=[0, 0, 1])
    two = sampled([-1.0], versions=[2])
    theirs = [[-1.5, -1.25, -1.0], [-1.0]]
    rows = mismatch([one, two], theirs)
    assert [(row.version, row.count, row.max) for row in rows] == [(2, 2, 0.5), (3, 2, 0.25)]
    rows = mismatch_by_lag([one, two], theirs)
    assert [(row.lag, row.count, row.max) for row in rows] == [(0, 3, 0.5), (1, 1, 0.0)]


def test_log_probabilities_may_be_given_for_all_tokens_or_for_sampled_ones() -> None:
    trajectory = sampled([-1.0, -2.0])
    whole = torch.tensor([math.nan, -9.0, -1.5, -2.0], requires_grad=True)
    assert mismatch([trajectory], [whole]) == mismatch([trajectory], [[-1.5, -2.0]])


def test_the_distribution_drawn_from_can_be_compared_instead() -> None:
    (row,) = mismatch([sampled([-1.0])], [[-0.5]], column="logprob")
    assert row.max == 0


def test_what_does_not_fit_is_named() -> None:
    one = sampled([-1.0, -2.0])
    with pytest.raises(ValueError, match="1 trajectories, and log-probabilities of 2"):
        mismatch([one], [[-1.0, -2.0]] * 2)
    with pytest.raises(ValueError, match=r"trajectory 7 has 4 tokens, 2 of them .* shape \[3\]"):
        mismatch([one], [[-1.0, -2.0, -3.0]])
    with pytest.raises(ValueError, match="trajectory 7: the log-probability of token 3 is NaN"):
        mismatch([one], [[-1.0, math.nan]])
    assert mismatch([], []) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_a_transformers_model_of_the_same_weights_agrees(name: str) -> None:
    config = load_config(preset="tiny", overrides=(f"model.path={name}", "sampling.max_tokens=20"))
    with Rollout(config) as rollout:
        trajectories = rollout.generate([f"prompt {n}" for n in range(4)])
    model = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32)
    heard: list[tuple[int, int]] = []
    rows = mismatch_of_transformers(
        model, trajectories, on_progress=lambda done, total: heard.append((done, total))
    )
    assert [(row.version, row.count) for row in rows] == [
        (0, sum(trajectory.sampled_tokens for trajectory in trajectories))
    ]
    assert rows[0].max <= 1e-5
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
    other = replace(trajectories[0], token_ids=np.flip(trajectories[0].token_ids).copy())
    assert mismatch([trajectories[0]], [logprobs_of_transformers(model, other)])[0].max > 0.1


def gap(mean: float, count: int = 10) -> list[VersionMismatch]:
    (row,) = mismatch([sampled([-1.0] * count)], [[-1.0 - mean] * count])
    return [row]


def test_the_gate_stays_open_while_the_gap_only_varies() -> None:
    gate = DriftGate(num_first=2, factor=1.5)
    for mean in (0.010, 0.012, 0.017, 0.011, 0.0179):
        gate.check(gap(mean), "digest")
    assert gate.gaps == pytest.approx([0.010, 0.012, 0.017, 0.011, 0.0179])


def test_the_gate_raises_when_the_gap_grows_though_weights_do_not_change() -> None:
    gate = DriftGate(num_first=2, factor=1.5)
    for mean in (0.011, 0.012, 0.014):
        gate.check(gap(mean), "digest")
    with pytest.raises(DriftError, match=r"step 3: .* is 0\.036 .* 0\.012 in the first 2"):
        gate.check(gap(0.036), "digest")


def test_rounding_is_no_drift() -> None:
    gate = DriftGate(num_first=1)
    gate.check(gap(1e-8), "digest")
    gate.check(gap(9e-6), "digest")
    with pytest.raises(DriftError):
        gate.check(gap(2e-5), "digest")


def test_the_gate_refuses_what_it_cannot_judge() -> None:
    gate = DriftGate()
    gate.check(gap(0.01), "one digest")
    with pytest.raises(ValueError, match="weights changed at step 1, from digest one digest to"):
        gate.check(gap(0.01), "another")
    with pytest.raises(ValueError, match="step 1 has no sampled tokens"):
        gate.check([], "one digest")
    with pytest.raises(ValueError, match="factor above 1"):
        DriftGate(factor=1.0)
