"""Some rows with their fix and without; `make complaints` does so with all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.complaints.mutation import Mutation, Reached, disable

from interlace.rollout.verify.complaints.complaint import Proof
from interlace.rollout.verify.complaints.ended import Ended, Outcome, Seen
from interlace.rollout.verify.complaints.registry import PROOFS
from interlace.rollout.verify.complaints.run import see_all

HERE = (24, 42)
BLIND = Proof(
    test="tests/comm/test_agreement.py::test_hashes_are_compared_within_each_group_only",
    disabled="hashes are not compared",
)
"""Equal hashes: this test cannot see whether different ones would be found."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_tests_of_the_table_pass_with_their_fix_and_fail_without() -> None:
    told: list[str] = []
    rows = [(row, proof) for row, proof in PROOFS if row in HERE]
    seen = list(see_all([*rows, (0, BLIND)], told.append))
    assert [one.row for one in seen if one.holds] == [row for row, _ in rows], seen
    blind = seen[-1]
    assert (blind.fixed.outcome, blind.disabled.outcome) == ("passed", "passed")
    assert blind.disabled.reached
    assert len(told) >= 2 * len(seen)


def ended(outcome: Outcome, *, reached: bool = True) -> Ended:
    return Ended(outcome=outcome, words="", reached=reached)


@pytest.mark.parametrize(
    ("fixed", "disabled", "holds"),
    [
        (ended("passed"), ended("failed"), True),
        (ended("passed"), ended("hung"), False),
        (ended("passed"), ended("passed"), False),
        (ended("passed"), ended("skipped"), False),
        (ended("passed"), ended("no result"), False),
        (ended("passed"), ended("failed", reached=False), False),
        (ended("failed"), ended("failed"), False),
        (ended("skipped"), ended("failed"), False),
    ],
)
def test_a_row_holds_if_its_test_fails_because_of_what_was_disabled(
    fixed: Ended, disabled: Ended, holds: bool
) -> None:
    seen = Seen(row=1, proof=BLIND, fixed=fixed, disabled=disabled)
    assert seen.holds is holds


def test_a_test_that_is_to_hang_does_not_only_fail() -> None:
    hangs = replace(BLIND, hangs=True)
    for outcome, holds in (("hung", True), ("failed", False)):
        seen = Seen(row=1, proof=hangs, fixed=ended("passed"), disabled=ended(outcome))
        assert seen.holds is holds


class Kinds:
    """Every kind of function that can be replaced."""

    def method(self) -> str:
        return "fixed"

    @property
    def value(self) -> str:
        return "fixed"

    @classmethod
    def of_class(cls) -> str:
        return "fixed"

    @staticmethod
    def static() -> str:
        return "fixed"


@pytest.mark.parametrize("name", ["method", "value", "of_class", "static"])
def test_what_stands_in_is_called_and_says_so(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kinds, name, vars(Kinds)[name])  # so that it is put back
    path = tmp_path_factory.mktemp("reached") / "reached"
    target = f"{__name__}:Kinds.{name}"
    mutation = Mutation(name="", target=target, change=lambda function: lambda *args: "disabled")
    disable(mutation, Reached(path))
    assert not path.exists()
    found = getattr(Kinds(), name)
    assert (found if name == "value" else found()) == "disabled"
    assert path.exists()
