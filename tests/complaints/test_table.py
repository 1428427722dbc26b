"""The page of complaints is whole, current, and names tests and functions that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.complaints.mutation import Mutation, function_at
from tests.complaints.mutations import ALL, MUTATIONS

from interlace.rollout.verify.complaints.complaint import Proof
from interlace.rollout.verify.complaints.registry import COMPLAINTS, PROOFS
from interlace.rollout.verify.complaints.table import markdown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "complaints.md"

each_proof = pytest.mark.parametrize("proof", [proof for _, proof in PROOFS], ids=lambda p: p.test)
each_mutation = pytest.mark.parametrize("mutation", ALL, ids=lambda m: m.name)


def test_the_page_of_complaints_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run make docs"


def test_each_of_the_43_complaints_has_its_row_and_its_answer() -> None:
    assert [complaint.row for complaint in COMPLAINTS] == list(range(1, 44))
    for complaint in COMPLAINTS:
        assert complaint.threads, complaint
        assert complaint.complaint.endswith("."), complaint
        assert complaint.what.endswith("."), complaint
        assert "|" not in complaint.complaint + complaint.what, "it ends a cell of the table"


def test_what_is_not_answered_has_no_proof() -> None:
    for complaint in COMPLAINTS:
        if complaint.answer in ("not yet", "not applicable"):
            assert complaint.proofs == (), complaint


@each_proof
def test_a_test_that_is_named_exists(proof: Proof) -> None:
    file, _, name = proof.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert name.partition("[")[0] in defined


@each_proof
def test_a_fix_that_is_named_can_be_disabled(proof: Proof) -> None:
    assert proof.disabled in MUTATIONS


@each_mutation
def test_a_mutation_has_a_function_to_replace(mutation: Mutation) -> None:
    owner, name, held = function_at(mutation.target)
    assert isinstance(held, property | staticmethod | classmethod) or callable(held)
    assert name in vars(owner), "inherited: others would be changed with it"


def test_no_mutation_is_left_over() -> None:
    assert sorted(MUTATIONS) == sorted(mutation.name for mutation in ALL), "a name is used twice"
    assert set(MUTATIONS) == {proof.disabled for _, proof in PROOFS}
