"""Every public bug of the catalogue: the unsafe way is seen to fail as described, ours is right.

Ids hold the row. Cases of real processes share one server that forks their ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.rollout.verify.hazards.forks import Forks
from interlace.rollout.verify.hazards.hazard import Hazard, Processes
from interlace.rollout.verify.hazards.registry import HAZARDS, NOT_SHOWN
from interlace.rollout.verify.hazards.table import markdown, summary

PAGE = Path(__file__).parents[2] / "docs/safety/hazards.md"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


def ways(way: str) -> list[object]:
    marks = [pytest.mark.slow, pytest.mark.processes]
    return [
        pytest.param(
            hazard,
            id=f"row {hazard.row}",
            marks=marks if isinstance(getattr(hazard, way), Processes) else [],
        )
        for hazard in HAZARDS
    ]


@pytest.mark.parametrize("hazard", ways("unsafe"))
def test_the_unsafe_way_fails_as_described(hazard: Hazard, forks: Forks) -> None:
    outcome = forks.see(hazard.unsafe)
    assert outcome.kind == hazard.expected, outcome.evidence
    assert outcome.evidence


@pytest.mark.parametrize("hazard", ways("ours"))
def test_ours_is_right(hazard: Hazard, forks: Forks) -> None:
    outcome = forks.see(hazard.ours)
    assert outcome.kind == "right", outcome.evidence
    assert outcome.evidence


def test_every_row_of_the_catalogue_has_a_case_or_a_reason() -> None:
    rows = [hazard.row for hazard in HAZARDS] + [row.row for row in NOT_SHOWN]
    assert sorted(rows) == list(range(1, 48))


def test_every_case_says_what_it_does() -> None:
    for hazard in HAZARDS:
        assert summary(hazard.unsafe).endswith("."), hazard
        assert summary(hazard.ours).endswith("."), hazard


def test_the_page_of_hazards_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "run make docs"
