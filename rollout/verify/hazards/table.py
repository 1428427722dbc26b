"""The catalogue as a table: seen on this machine, or as the page docs/safety/hazards.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .forks import Forks
from .hazard import Case, Hazard, Outcome, Processes
from .registry import HAZARDS, NOT_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How both ways of a hazard ended."""

    hazard: Hazard
    unsafe: Outcome
    ours: Outcome

    @property
    def reproduced(self) -> bool:
        """The unsafe way failed as expected and ours did not."""
        return self.unsafe.kind == self.hazard.expected and self.ours.kind == "right"


def see_all() -> Iterator[Seen]:
    """Every hazard that has a case, in order of rows, as it is run."""
    with Forks() as forks:
        for hazard in HAZARDS:
            unsafe, ours = forks.see(hazard.unsafe), forks.see(hazard.ours)
            yield Seen(hazard=hazard, unsafe=unsafe, ours=ours)


def print_table(console: Console) -> bool:
    """Run and print all of them; whether every one was reproduced."""
    seen = list(see_all())
    table = Table(title="Hazards", show_lines=True)
    for heading in ("row", "public issue", "hazard", "unsafe way", "ours"):
        table.add_column(heading, overflow="fold")
    for one in seen:
        table.add_row(
            str(one.hazard.row),
            one.hazard.url,
            one.hazard.title,
            _cell(one.unsafe, one.hazard.expected),
            _cell(one.ours, "right"),
        )
    console.print(table)
    for row in NOT_SHOWN:
        console.print(f"not shown: {row.row}, {row.title}: {row.why} ({row.url})", markup=False)
    num = sum(one.reproduced for one in seen)
    console.print(f"{num} of {len(seen)} reproduced, and right under the plan")
    return num == len(seen)


def markdown() -> str:
    """The page; it ends with a newline and changes only with the registry."""
    return "\n".join([_INTRODUCTION, *map(_row, HAZARDS), *_not_shown()]) + "\n"


_INTRODUCTION = """\
# Hazards

Public bugs of multi-rank inference, each in miniature: the unsafe way is run and seen to fail, then
the same situation under Interlace. `interlace verify --hazards` runs them all and shows what
happened. This page is written by `make docs` from `rollout/verify/hazards/`.

| row | public issue | hazard | the unsafe way | ends in | Interlace | how |
|---|---|---|---|---|---|---|"""


def _row(hazard: Hazard) -> str:
    cells = (
        str(hazard.row),
        _link(hazard.url),
        hazard.title,
        summary(hazard.unsafe),
        hazard.expected,
        summary(hazard.ours),
        hazard.how,
    )
    return f"| {' | '.join(cells)} |"


def _not_shown() -> Iterator[str]:
    if NOT_SHOWN:
        yield "\n## Not shown\n\n| row | public issue | hazard | why not |\n|---|---|---|---|"
    for row in NOT_SHOWN:
        yield f"| {row.row} | {_link(row.url)} | {row.title} | {row.why} |"


def summary(case: Case) -> str:
    """What a case does, from the first sentence of its code."""
    code = case.program if isinstance(case, Processes) else case
    return " ".join((code.__doc__ or "").split("\n\n")[0].split())


def _link(url: str) -> str:
    found = re.fullmatch(r"https://github.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", url)
    return f"[{found[1]}#{found[2]}]({url})" if found else url


def _cell(outcome: Outcome, wanted: str) -> str:
    colour = "green" if outcome.kind == wanted else "red"
    evidence = outcome.evidence.replace("[", r"\[")
    return f"[{colour}]{outcome.kind}[/]: {evidence[:_LONGEST]}"


_LONGEST = 300


if __name__ == "__main__":
    print(markdown(), end="")
