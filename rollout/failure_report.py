"""A failure of ranks, on disk and on screen."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from interlace.comm.verdict import Diagnosis, RankDiagnosis, Verdict

_STYLES = {Verdict.WAITING: "dim", Verdict.RUNNING: "dim"}
_SHOWN = 3


def write_failure(folder: Path, diagnosis: Diagnosis) -> None:
    """`diagnosis.json` for all ranks, and `rank-N.json` with the last tickets of each.

    Times in the files are seconds before the diagnosis.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [_fields(rank, diagnosis.at) for rank in diagnosis.ranks]
    for fields in ranks:
        _write(folder / f"rank-{fields['rank']}.json", fields)
    brief = [{key: rank[key] for key in rank if key != "tickets"} for rank in ranks]
    _write(
        folder / "diagnosis.json",
        {
            "text": diagnosis.text,
            "noticed_by": diagnosis.by,
            "deadline_s": round(diagnosis.deadline_s, 3),
            "ranks": brief,
        },
    )


def failure_table(diagnosis: Diagnosis) -> Table:
    """One row a rank, those to blame in red."""
    table = Table(title="what every rank was doing", title_justify="left")
    for heading in ("rank", "verdict", "what", "last tickets"):
        table.add_column(heading, overflow="fold")
    for rank in diagnosis.ranks:
        last = [f"{t.seq} {t.path}/{t.role} {t.stage} {t.reached}" for t in rank.tickets[-_SHOWN:]]
        style = _STYLES.get(rank.verdict, "bold red")
        cells = (str(rank.rank), rank.verdict, rank.what, "\n".join(last))
        table.add_row(*map(Text, cells), style=style)
    return table


def _fields(rank: RankDiagnosis, at: float) -> dict[str, object]:
    fields = asdict(rank)
    fields["tickets"] = [
        {
            **{key: value for key, value in asdict(ticket).items() if not key.endswith("_at")},
            "reached": ticket.reached,
            "computing_s_ago": _ago(ticket.computing_at, at),
            "posted_s_ago": _ago(ticket.posted_at, at),
            "settled_s_ago": _ago(ticket.settled_at, at),
        }
        for ticket in rank.tickets
    ]
    return fields


def _ago(then: float, now: float) -> float | None:
    return round(now - then, 6) if then else None


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
