"""Each test of docs/complaints.md with its fix, and again without.

    python -m interlace.rollout.verify.complaints

Ends with 0 only if each passes with the fix in place and fails where that is disabled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .ended import Seen
from .registry import COMPLAINTS, PROOFS
from .run import see_all

_LONGEST, _WIDE = 100, 150


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows")
    rows = parser.parse_args().rows
    proofs = [(row, proof) for row, proof in PROOFS if rows is None or row in rows]
    if not proofs:
        parser.error(f"of the rows {', '.join(map(str, rows))} none has a test")
    console, began_at = Console(highlight=False, soft_wrap=True), time.monotonic()

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began_at:5.0f} s  {text}", markup=False)

    seen = list(see_all(proofs, tell))
    Console(highlight=False, width=None if console.is_terminal else _WIDE).print(_table(seen))
    num_rows, num = len({one.row for one in seen}), sum(one.holds for one in seen)
    console.print(
        f"{num} of {len(seen)} tests pass with their fix and fail without it: {num_rows} of "
        f"{len(COMPLAINTS)} rows, {time.monotonic() - began_at:.0f} s"
    )
    return 0 if num == len(seen) else 1


def _table(seen: Sequence[Seen]) -> Table:
    table = Table(title="Complaints", show_lines=True)
    for heading in ("row", "test", "with its fix", "disabled", "then", ""):
        table.add_column(heading, overflow="fold")
    for one in seen:
        fixed, then = one.fixed, one.disabled
        if then.outcome in ("failed", "hung") and not then.reached:
            words = "not because of what was disabled, which it never came to"
        else:
            words = then.words[:_LONGEST]
        cells = (
            str(one.row),
            one.proof.test.partition("::")[2],
            " ".join((fixed.outcome, fixed.words[:_LONGEST])).strip(),
            one.proof.disabled,
            f"{then.outcome}: {words}".removesuffix(": "),
        )
        verdict = "[green]holds[/]" if one.holds else "[red]does not hold[/]"
        table.add_row(*(cell.replace("[", r"\[") for cell in cells), verdict)
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
