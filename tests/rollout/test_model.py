import os
import re
from pathlib import Path

import pytest

from interlace.rollout.verify import model, model_page
from interlace.rollout.verify.model_bounds import MUTANTS, SEARCHES, Bounds, Mutant

SAFETY = Path(__file__).parents[2] / "docs" / "safety"

CLEAN = """
State-vector 200 byte, depth reached 1422, errors: 0
  1109974 states, stored
  1774994 transitions (= stored+matched)
"""
BROKEN = """
pan:1: assertion violated (((no_unread_overwritten||(c==0))||((c>>7)!=e)) (at depth 125)
State-vector 192 byte, depth reached 127, errors: 1
       53 states, stored
"""
BOUND = Bounds(name="some", covers="something")
MUTANT = Mutant(name="some", rule="some", macros={}, promises=("no_unread_overwritten",))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_model_keeps_its_promises_and_its_mutants_do_not():
    missing = model.unavailable()
    if missing:
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    found = model.check(seconds=25)
    assert found.holds, found.failures
    assert found.states > 500_000
    assert found.num_mutants >= 5


def test_what_spin_says_of_a_clean_search_is_read():
    outcome = model._outcome(BOUND, CLEAN, complete=True, cpu_s=1.0)
    assert (outcome.states, outcome.transitions, outcome.found) == (1_109_974, 1_774_994, "")
    assert outcome.holds


def test_a_broken_promise_is_named():
    outcome = model._outcome(MUTANT, BROKEN, complete=True, cpu_s=1.0)
    assert outcome.found == "no_unread_overwritten"
    assert outcome.holds
    assert not model._outcome(BOUND, BROKEN, complete=True, cpu_s=1.0).holds


@pytest.mark.parametrize(
    ("said", "complete"),
    [
        (CLEAN, False),
        (CLEAN + "error: max search depth too small\n", True),
        (CLEAN + "pan: reached -DMEMLIM bound\npan: out of memory\n", True),
        ("", True),
    ],
    ids=["killed", "too deep", "too large", "silent"],
)
def test_a_search_that_did_not_end_proves_nothing(said, complete):
    assert not model._outcome(BOUND, said, complete=complete, cpu_s=1.0).holds


def test_a_mutant_that_breaks_another_promise_than_expected_is_not_killed():
    said = BROKEN.replace("no_unread_overwritten", "bounded_bypass")
    assert not model._outcome(MUTANT, said, complete=True, cpu_s=1.0).holds
    assert not model._outcome(MUTANT, CLEAN, complete=True, cpu_s=1.0).holds


def test_where_spin_is_missing_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = model.check(seconds=1)
    assert "apt-get install spin" in found.unavailable
    assert not found.holds


def test_the_results_on_file_are_of_this_model_and_hold():
    results = model.recorded(SAFETY / "model_results.json")
    for asked in SEARCHES:
        entry = results[model_page.key_of(asked)]
        assert entry["fingerprint"] == model.fingerprint(asked), f"{asked.name}: run make model"
        assert entry["holds"] is True
    assert model_page.total_states(results) >= 100_000_000
    assert len(MUTANTS) >= 14


def test_the_page_shows_the_results_on_file():
    page = (SAFETY / "model.md").read_text()
    assert page == model_page.written(page, model.recorded(SAFETY / "model_results.json"))


def test_every_mutant_of_the_model_is_asked_for_and_none_else():
    text = model.PROTOCOL.read_text()
    known = set(re.findall(r"\bM_[A-Z_]+\b", text))
    asked = {name for mutant in MUTANTS for name in mutant.macros if name.startswith("M_")}
    assert asked == known - {"M_"}


def test_the_model_is_one_file():
    assert model.PROTOCOL.resolve() == SAFETY / "protocol.pml"
