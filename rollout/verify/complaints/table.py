"""The complaints as the page docs/complaints.md."""

from __future__ import annotations

import re
from collections import Counter

from .complaint import Complaint, Proof
from .registry import CHAPTERS, COMPLAINTS, PROOFS


def markdown() -> str:
    """The page; it ends with a newline and changes only with the registry."""
    parts = [_INTRODUCTION, _counts(), ""]
    for heading, rows in CHAPTERS:
        parts += [f"## {heading}", "", _HEAD, *map(_row, rows), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


_INTRODUCTION = """\
# Complaints

What people who train with other systems complained about in public, in our words, and what
Interlace does about it. The threads were read in August 2026; their states may have changed since.

Where a test is named, it was seen to notice: `make complaints` runs each test with the fix in
place, when it must pass, and again with the fix disabled, when it must fail. A fix is disabled by
replacing one function in the process that runs the test (`tests/complaints/`); nothing in the
product knows of it. This page is written by `make docs` from `rollout/verify/complaints/`.
"""
_HEAD = """\
| row | threads | complaint | answer | Interlace | seen by |
|---|---|---|---|---|---|"""


def _counts() -> str:
    found = Counter(complaint.answer for complaint in COMPLAINTS)
    rows = len({row for row, _ in PROOFS})
    return (
        f"{len(COMPLAINTS)} complaints: {found['answered']} answered, {found['partly']} partly, "
        f"{found['not yet']} not yet, {found['not applicable']} not applicable. {rows} rows have a "
        "test that fails without the fix."
    )


def _row(complaint: Complaint) -> str:
    cells = (
        str(complaint.row),
        ", ".join(map(_link, complaint.threads)),
        complaint.complaint,
        complaint.answer,
        complaint.what,
        " · ".join(map(_seen_by, complaint.proofs)),
    )
    return f"| {' | '.join(cells)} |"


def _seen_by(proof: Proof) -> str:
    ends = ", and it hangs" if proof.hangs else ""
    return f"`{proof.test}`; without the fix {proof.disabled}{ends}"


def _link(thread: str) -> str:
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", thread)
    if found is None:
        return thread
    return f"[{thread}](https://github.com/{found[1]}/issues/{found[2]})"


if __name__ == "__main__":
    print(markdown(), end="")
