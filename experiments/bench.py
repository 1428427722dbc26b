"""Is Interlace as fast as it means to be? Every figure that has a bar, in one table.

    python experiments/bench.py --out out/bench      (make bench)

Each part is a script of its own and leaves its JSON in a folder below `--out`; a part that is there
is not made again, so stop it when you like and call it again; remove a part's folder to have it
made anew. Figures of other engines are read from what `interlace bench peers --out out/peers` left,
and with `--no-tiles` in out/peers-without-tiles.

Expect most of an hour for a whole table on two cores; beside each figure stands the load average
when it was made, since a machine with other work says less.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from interlace.experiments.figures_with_bars import (
    Figure,
    exactness,
    modes,
    peers,
    scheduler,
    steps,
)

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A script, what it is called with, where it leaves its JSON, and how that is read."""

    script: str
    arguments: tuple[str, ...] = ()
    leaves: str
    read: Callable[[Any], list[Figure]]


PARTS: Mapping[str, Part] = {
    "exactness": Part(script="exactness_price.py", leaves="exactness_price.json", read=exactness),
    "steps": Part(
        script="profile_step.py",
        arguments=("--only", "decode 1", "--only", "decode 16", "--only", "prefill 512"),
        leaves="profile.json",
        read=steps,
    ),
    "scheduler": Part(script="bench_scheduler.py", leaves="scheduler.json", read=scheduler),
    "modes": Part(script="bench_modes.py", leaves="bench.json", read=modes),
}

PEERS_JSON = (Path("out/peers/peers.json"), Path("out/peers-without-tiles/peers.json"))


def make(part: Part, folder: Path) -> str:
    """What is wrong with a part, empty if it is there now."""
    if (folder / part.leaves).is_file():
        return ""
    command = [sys.executable, str(HERE / part.script), *part.arguments, "--out", str(folder)]
    done = subprocess.run(command, check=False)
    return f"{part.script} ended with {done.returncode}" if done.returncode else ""


def gathered(
    out: Path, peers_json: Sequence[Path], only: list[str], console: Console
) -> list[Figure]:
    """All figures; parts that are missing are made."""
    found = []
    for name, part in PARTS.items():
        wrong = "left out"
        if not only or name in only:
            if not (out / name / part.leaves).is_file():
                console.rule(name)
            wrong = make(part, out / name)
        if wrong:
            found.append(Figure(part=name, what=wrong, value="-"))
            continue
        found += part.read(json.loads((out / name / part.leaves).read_text(encoding="utf-8")))
    there = [path for path in peers_json if path.is_file()]
    for path in there:
        found += peers(json.loads(path.read_text(encoding="utf-8")))
    return found if there else [*found, Figure(part="peers", what="not run: make peers", value="-")]


def table(figures: list[Figure]) -> Table:
    made = Table(title="what is measured, and what it should be")
    for column in ("", "figure", "value", "bar", "reached", "load"):
        made.add_column(column, justify="left" if column in ("", "figure") else "right")
    before = ""
    for figure in figures:
        if before and figure.part != before:
            made.add_section()
        made.add_row(
            figure.part if figure.part != before else "",
            figure.what,
            figure.value,
            figure.bar,
            {None: "", True: "yes", False: "NO"}[figure.reached],
            "" if figure.load is None else f"{figure.load:.1f}",
        )
        before = figure.part
    return made


def main(
    out: Annotated[Path, typer.Option(help="Folder for the parts and bench.json.")],
    peers_json: Annotated[
        list[Path] | None, typer.Option("--peers", help="What `interlace bench peers` left.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Parts to make: {', '.join(PARTS)}.")
    ] = None,
) -> None:
    """Make the parts that are missing and print the table. Exit code 1: a part failed."""
    unknown = sorted({*(only or ())} - {*PARTS})
    if unknown:
        raise typer.BadParameter(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    console = Console(highlight=False, width=140, markup=False)
    out.mkdir(parents=True, exist_ok=True)
    figures = gathered(out, peers_json or PEERS_JSON, only or [], console)
    text = json.dumps([figure.as_json() for figure in figures], indent=1)
    (out / "bench.json").write_text(text + "\n", encoding="utf-8")
    console.print(table(figures))
    console.print(f"{out / 'bench.json'}")
    if any("ended with" in figure.what for figure in figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
