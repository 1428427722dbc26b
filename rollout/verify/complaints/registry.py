"""All rows of the page, by chapter."""

from __future__ import annotations

from . import hangs, long_tail, losses, numbers, processes, tokens, versions
from .complaint import Complaint, Proof

CHAPTERS: tuple[tuple[str, tuple[Complaint, ...]], ...] = (
    ("Hangs and deadlocks", hangs.COMPLAINTS),
    ("Long tail and routing of requests", long_tail.COMPLAINTS),
    ("Weights, keys and values, and their versions", versions.COMPLAINTS),
    ("Log-probabilities, routing to experts, determinism", numbers.COMPLAINTS),
    ("Tokens, masks, truncation", tokens.COMPLAINTS),
    ("Lost, doubled and biased trajectories", losses.COMPLAINTS),
    ("Faults of environments and processes", processes.COMPLAINTS),
)
"""Heading and rows, in the order of the rows."""

COMPLAINTS: tuple[Complaint, ...] = tuple(row for _, rows in CHAPTERS for row in rows)

PROOFS: tuple[tuple[int, Proof], ...] = tuple(
    (complaint.row, proof) for complaint in COMPLAINTS for proof in complaint.proofs
)
"""Row and proof, in order."""
