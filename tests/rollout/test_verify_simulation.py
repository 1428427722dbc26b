"""The shipped engine in thousands of simulated worlds: no seed may find a violation."""

from pathlib import Path

import pytest

from interlace.rollout.verify import faults
from interlace.rollout.verify.campaign import campaign, replay, run_seeds
from interlace.rollout.verify.mutants import MUTANTS, Mutant, hunt
from interlace.rollout.verify.scenario import scenario
from interlace.rollout.verify.simulation import Simulation

SEEDS = 20_000
RANGES = 10
USUAL = 2
"""Ranges that `make test` runs; `make simulation` runs all."""
KEPT = [
    int(line.split()[0])
    for line in (Path(__file__).parent.parent / "seeds.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "part",
    [
        *range(USUAL),
        *(pytest.param(part, marks=pytest.mark.simulation) for part in range(USUAL, RANGES)),
    ],
)
def test_no_seed_finds_a_violation(part: int) -> None:
    num = SEEDS // RANGES
    tally = campaign(part * num, num)
    assert tally.failures == []
    assert tally.seeds == num
    assert len(tally.interleavings) > 0.99 * num
    assert sum(tally.faults.values()) > 20
    assert all(tally.events[name] for name in ("both paths in one step", "update drains a prefill"))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_dies_within_a_hundred_seeds(mutant: Mutant) -> None:
    assert hunt(mutant) is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_once_found_a_mistake_find_none_now(seed: int) -> None:
    replay(seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
def test_every_fault_ends_as_it_must(kind: str) -> None:
    assert sum(faults.provoke(seed, kind) for seed in range(12)) > 3


def test_one_seed_is_one_schedule_and_another_seed_another() -> None:
    def trace(seed: int) -> bytes:
        run = Simulation(scenario(seed))
        run.run()
        return run.trace

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


def test_a_violation_is_told_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(run: Simulation) -> None:
        raise AssertionError("nothing is ever right")

    monkeypatch.setattr("interlace.rollout.verify.campaign.check", never)
    assert run_seeds([5]).failures == [(5, "seed 5: AssertionError: nothing is ever right")]
