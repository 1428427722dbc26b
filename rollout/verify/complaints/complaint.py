"""One public complaint, the answer to it, and the tests that would notice if that were lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Answer = Literal["answered", "partly", "not yet", "not applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A test that passes with a fix in place, and fails once that is disabled."""

    test: str
    """As pytest is given it, at the root of the repository."""
    disabled: str
    """What is true without the fix: the name of a mutation in tests/complaints."""
    hangs: bool = False
    """Whether the test then does not end, as what it is about did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A row of the page."""

    row: int
    threads: tuple[str, ...]
    """Where it was read: `owner/repository#number`, or a project's name and number where the
    address is not known."""
    complaint: str
    answer: Answer
    what: str
    """What Interlace does about it, or why nothing."""
    proofs: tuple[Proof, ...] = ()
