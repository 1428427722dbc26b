"""Sampling: masks, filters, probabilities, and independence of everything but the arguments."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.moe.sampler import (
    Sampled,
    SampleRow,
    gumbel,
    gumbel_argmax,
    sample,
    uniform_noise,
    validate,
)
from interlace.moe.sampling_params import SamplingParams

VOCAB = 40
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    allowed_token_ids=st.sampled_from([(), (7,), (3, 9, 21), (39, 0)]),
)


def row(params: SamplingParams, position: int = 0, generated: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(params=params, seed=5, trajectory=9, position=position, generated=generated)


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(scale=2, size=(rows, VOCAB)).astype(np.float32)
    )


def one(logits_SV: torch.Tensor, params: SamplingParams, **kwargs: object) -> Sampled:
    return sample(logits_SV[:1], [row(params, **kwargs)])[0]  # type: ignore[arg-type]


def reference(logits_V: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The distribution, written down as the docstring of SamplingParams says it: slow, obvious."""
    tokens = list(params.allowed_token_ids) or list(range(VOCAB))
    scale = params.temperature or 1.0
    weight = {t: math.exp(float(logits_V[t]) / scale) for t in tokens}
    ranked = sorted(weight, key=lambda t: (-weight[t], t))
    if params.temperature > 0:
        if params.top_k:
            ranked = ranked[: params.top_k]
        total, mass, kept = sum(weight[t] for t in ranked), 0.0, []
        for t in ranked:
            kept.append(t)
            mass += weight[t] / total
            if mass >= params.top_p:
                break
        ranked = kept
    total = sum(weight[t] for t in ranked)
    return {t: weight[t] / total for t in ranked}


@given(params=PARAMS, seed=st.integers(0, 10_000), position=st.integers(0, 3000))
def test_a_row_is_sampled_from_the_filtered_distribution(
    params: SamplingParams, seed: int, position: int
) -> None:
    logits_SV = logits(seed)
    expected = reference(logits_SV[0], params)
    found = one(logits_SV, params, position=position)
    assert found.token in expected
    assert found.logprob == pytest.approx(math.log(expected[found.token]), abs=1e-5)
    raw = torch.log_softmax(logits_SV[0].double(), 0)[found.token]
    assert found.logprob_raw == pytest.approx(float(raw), abs=1e-5)
    assert np.float32(found.logprob) == found.logprob
    if params.temperature == 0:
        assert found.token == min(expected, key=lambda t: (-expected[t], t))


@given(seed=st.integers(0, 1000), params=st.lists(PARAMS, min_size=1, max_size=6))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    seed: int, params: list[SamplingParams]
) -> None:
    logits_SV = logits(seed, len(params))
    rows = [row(p, position=i) for i, p in enumerate(params)]
    together = sample(logits_SV, rows)
    apart = [sample(logits_SV[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    reverse = sample(logits_SV.flip(0), rows[::-1])[::-1]
    assert together == apart == reverse


def test_frequencies_over_positions_are_the_probabilities() -> None:
    logits_SV = logits(3)
    params = SamplingParams(temperature=1.3, top_k=6)
    expected = reference(logits_SV[0], params)
    count = 4000
    drawn = sample(logits_SV.expand(count, -1), [row(params, position=i) for i in range(count)])
    found = Counter(s.token for s in drawn)
    assert set(found) == set(expected)
    for token, probability in expected.items():
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(found[token] - count * probability) < 4 * spread


def test_noise_differs_by_every_argument_and_is_standard_gumbel() -> None:
    base = {"seed": 1, "trajectory": 2, "position": 3}
    noise_V = gumbel(uniform_noise(**base, vocab_size=20_000))
    assert np.array_equal(noise_V, gumbel(uniform_noise(**base, vocab_size=20_000)))
    for name in base:
        other = gumbel(uniform_noise(**(base | {name: 7}), vocab_size=20_000))
        assert abs(np.corrcoef(noise_V, other)[0, 1]) < 0.03
    assert noise_V.mean() == pytest.approx(0.5772, abs=0.03)
    assert noise_V.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.03)
    assert np.array_equal(noise_V[:100], gumbel(uniform_noise(**base, vocab_size=100)))


def test_positions_have_no_noise_in_common() -> None:
    noise = {
        position: uniform_noise(seed=1, trajectory=2, position=position, vocab_size=400)
        for position in range(20)
    }
    assert len(np.unique(np.concatenate(list(noise.values())))) == 20 * 400


def test_tokens_of_neighbouring_positions_are_independent() -> None:
    flat = torch.zeros(3000, VOCAB)
    drawn = sample(flat, [row(SamplingParams(), position=nth) for nth in range(len(flat))])
    steps = Counter((one.token - other.token) % VOCAB for other, one in pairwise(drawn))
    expected = (len(flat) - 1) / VOCAB
    assert all(abs(steps[step] - expected) < 5 * math.sqrt(expected) for step in range(VOCAB))


def test_the_noise_of_one_counter_never_changes() -> None:
    noise_V = gumbel(uniform_noise(seed=1, trajectory=2, position=3, vocab_size=3))
    assert noise_V.tolist() == pytest.approx([-0.685834, -0.399208, -0.311599], abs=1e-5)


@given(
    st.integers(0, 2**31), st.sampled_from([1, 2, 50, 5000]), st.sampled_from([0, 1e-3, 1, 8, 400])
)
def test_the_few_that_are_looked_at_hold_the_largest_of_all(
    seed: int, num: int, spread: float
) -> None:
    draw = np.random.default_rng(seed)
    log_C = draw.standard_normal(num) * spread
    log_C -= np.log(np.exp(log_C - log_C.max()).sum()) + log_C.max()
    uniform_C = draw.random(num) + 2.0**-54
    assert gumbel_argmax(log_C, uniform_C) == np.argmax(log_C + gumbel(uniform_C))


@pytest.mark.parametrize("uniform", [2.0**-54, 0.5, 1 - 2.0**-53])
def test_extreme_noise_and_impossible_candidates_leave_the_right_one(uniform: float) -> None:
    log_C = np.array([-np.inf, -0.7, -0.7, -800.0, -np.inf])
    assert gumbel_argmax(log_C, np.full(5, uniform)) == 1
    uniform_C = np.array([1 - 2.0**-53, uniform, uniform, 1 - 2.0**-53, 1 - 2.0**-53])
    assert gumbel_argmax(log_C, uniform_C) == 1


def test_ties_go_to_the_lowest_id() -> None:
    flat = torch.zeros(1, VOCAB)
    assert one(flat, SamplingParams(temperature=0)).token == 0
    assert one(flat, SamplingParams(temperature=0, allowed_token_ids=(9, 4))).token == 4
    kept = {one(flat, SamplingParams(top_k=3), position=i).token for i in range(100)}
    assert kept == {0, 1, 2}


CHOICES = SamplingParams(choices=((1, 2), (1, 2, 3), (4,)), stop_token_ids=(0,))


def test_choices_allow_exactly_the_children_in_their_trie() -> None:
    def reachable(generated: tuple[int, ...]) -> set[int]:
        flat = torch.zeros(1, VOCAB)
        return {one(flat, CHOICES, position=i, generated=generated).token for i in range(60)}

    assert reachable(()) == {1, 4}
    assert reachable((1,)) == {2}
    assert reachable((1, 2)) == {3, 0}


def test_a_choice_is_done_when_no_other_goes_on_from_it() -> None:
    greedy = SamplingParams(temperature=0, choices=CHOICES.choices, stop_token_ids=(0,))
    flat = torch.zeros(1, VOCAB)
    assert not one(flat, greedy, generated=(1,)).done_choice
    flat[0, 3] = 1
    assert one(flat, greedy, generated=(1, 2)).done_choice
    flat[0, 0] = 2
    stopped = one(flat, greedy, generated=(1, 2))
    assert stopped.token == 0
    assert not stopped.done_choice
    flat[0, 4] = 3
    assert one(flat, greedy).done_choice
    assert not one(flat, SamplingParams(temperature=0)).done_choice


def test_a_turn_that_is_over_or_off_its_choices_cannot_go_on() -> None:
    for generated in ((4,), (1, 2, 3), (7,)):
        with pytest.raises(ValueError, match="no choice goes on"):
            one(logits(0), CHOICES, generated=generated)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature=-1), "temperature is -1"),
        (SamplingParams(temperature=math.nan), "temperature is nan"),
        (SamplingParams(temperature=math.inf), "temperature is inf"),
        (SamplingParams(top_p=0), "top_p is 0"),
        (SamplingParams(top_p=1.1), "top_p is 1.1"),
        (SamplingParams(top_k=-1), "top_k is -1"),
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        (SamplingParams(allowed_token_ids=(40,)), "allowed_token_ids has token id 40"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids has token id -1"),
        (SamplingParams(choices=((1, 99),)), "choices has token id 99"),
        (SamplingParams(choices=((1,), ())), "empty choice"),
        (SamplingParams(choices=((1,), (1, 2))), "needs stop_token_ids"),
        (SamplingParams(choices=((1,),), allowed_token_ids=(1,)), "exclude each other"),
    ],
)
def test_impossible_parameters_are_refused(params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(params, VOCAB)


@given(params=PARAMS)
def test_possible_parameters_are_not_refused(params: SamplingParams) -> None:
    validate(params, VOCAB)
    validate(CHOICES, VOCAB)


def test_rows_and_logits_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 rows to sample"):
        sample(logits(0, 2), [row(SamplingParams())])
    assert sample(torch.zeros(0, VOCAB), []) == []
