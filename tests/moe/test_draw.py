"""Rows drawn together: the reference's bits, or nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.moe import kernels
from interlace.moe.draw import Noise, draw
from interlace.moe.sampler import SampleRow, sample, sample_row
from interlace.moe.sampling_params import SamplingParams

needs_extension = pytest.mark.skipif(kernels.native is None, reason="there is no extension")
SIZES = st.sampled_from([1, 2, 3, 31, 32, 40, 255, 257, 1023, 1029, 5000])
SPREADS = st.sampled_from([0.0, 1e-30, 1e-15, 1e-9, 1e-3, 1.0, 3.0, 30.0, 1e4])
TEMPERATURES = st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 1.5, 20.0])
WORDS = st.sampled_from([0, 1, 12345, 2**63, 2**64 - 1, -3])
POSITIONS = st.sampled_from([0, 1, 700, 2**31, 2**63])


def some_logits(seed: int, num_rows: int, size: int, spread: float) -> np.ndarray:
    draws = np.random.default_rng(seed)
    logits = draws.standard_normal((num_rows, size)) * spread
    if seed % 5 == 0:  # as a model rounds them: equal ones
        logits = torch.from_numpy(logits).bfloat16().double().numpy()
    if seed % 7 == 0:
        logits[:, draws.integers(0, size, size // 2)] = -np.inf
        logits[:, draws.integers(0, size)] = 0.5
    if seed % 3 == 0:  # a model that is nearly sure
        logits[:, draws.integers(0, size)] += draws.integers(5, 40)
    return logits.astype(np.float32)


def row(temperature: float, noise: Noise) -> SampleRow:
    seed, trajectory, position = noise
    return SampleRow(
        params=SamplingParams(temperature=temperature),
        seed=seed,
        trajectory=trajectory,
        position=position,
    )


@given(
    seed=st.integers(0, 10_000),
    size=SIZES,
    spread=SPREADS,
    temperatures=st.lists(TEMPERATURES, min_size=1, max_size=4),
    noise=st.builds(Noise, WORDS, WORDS, POSITIONS),
)
def test_a_row_has_the_bits_of_the_reference_whatever_is_beside_it(
    seed: int, size: int, spread: float, temperatures: list[float], noise: Noise
) -> None:
    logits = some_logits(seed, len(temperatures), size, spread)
    rows = [row(temperature, noise) for temperature in temperatures]
    expected = [sample_row(logits_V, each) for logits_V, each in zip(logits, rows, strict=True)]
    assert sample(torch.from_numpy(logits), rows) == expected
    assert sample(torch.from_numpy(logits[::-1].copy()), rows[::-1]) == expected[::-1]
    assert sample(torch.from_numpy(logits[:1]), rows[:1]) == expected[:1]


@needs_extension
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_hardly_a_row_of_usual_logits_is_left_to_the_reference(temperature: float) -> None:
    logits = some_logits(1, 400, 1000, 3.0)
    noises = [Noise(1, nth, 700) for nth in range(len(logits))]
    found = draw(torch.from_numpy(logits), [temperature] * len(logits), noises)
    assert sum(drawn is None for drawn in found) < 4
    rows = [row(temperature, noise) for noise in noises]
    for logits_V, each, drawn in zip(logits, rows, found, strict=True):
        assert drawn is None or drawn.token == sample_row(logits_V, each).token


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nothing_is_said_of_what_is_not_a_number(wrong: float) -> None:
    logits = some_logits(1, 1, 100, 1.0)
    for at in (0, 50, 99):
        logits[0, at] = wrong
        assert draw(torch.from_numpy(logits), [1.0], [Noise(1, 2, 3)]) == [None]


def test_nothing_is_said_of_a_tie_of_more_than_a_few() -> None:
    assert draw(torch.zeros(1, 100), [0.0], [Noise(1, 2, 3)]) == [None]


def test_equally_likely_tokens_give_the_first() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [40, 70]] = 9
    found = draw(logits, [0.0], [Noise(1, 2, 3)])[0]
    assert found is None or found.token == 40


def test_without_an_extension_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "native", None)
    logits = torch.from_numpy(some_logits(1, 2, 10, 1.0))
    assert draw(logits, [1.0, 0.0], [Noise(1, 2, 3)] * 2) == [None, None]


@needs_extension
def test_what_is_no_temperature_or_no_noise_is_an_error_and_draws_nothing() -> None:
    logits, three = torch.zeros(1, 100), (1, 2, 3)
    for temperatures, noises, error in (
        (["hot"], [three], TypeError),
        ([1.0], [("seed", 2, 3)], TypeError),
        ([1.0], [(1, 2)], IndexError),
        ([1.0], [], ValueError),
    ):
        with pytest.raises(error):
            kernels.native.draw(logits.data_ptr(), 100, temperatures, noises)  # type: ignore[arg-type]
