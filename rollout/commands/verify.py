"""`interlace verify`: does order and isolation hold, and would we see it if it did not?"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from interlace.rollout.verify import campaign, model, tag_cost
from interlace.rollout.verify.hazards import table as hazards
from interlace.rollout.verify.hazards.registry import HAZARDS
from interlace.rollout.verify.mutants import MUTANTS

from .errors import FAILED, Traceback, one_line_errors

SEEDS = 1500
MODEL_SECONDS = 8.0


@dataclass(slots=True)
class Report:
    """What was asked, what was found, and whether it holds."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What failed, one line each."""

    @property
    def holds(self) -> bool:
        return all(holds for _, _, holds in self.rows)

    def add(self, what: str, found: str, holds: bool, **figures: Any) -> None:
        self.rows.append((what, found, holds))
        self.figures.update(figures)


def verify(
    seeds: Annotated[int, typer.Option(min=1, help="Simulated runs.")] = SEEDS,
    first_seed: Annotated[int, typer.Option(min=0, help="Where to begin, or to go on.")] = 0,
    only_hazards: Annotated[
        bool, typer.Option("--hazards", help="Only the public bugs, with their table.")
    ] = False,
    only_mutants: Annotated[
        bool, typer.Option("--mutants", help="Only the broken rules, and what finds each.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 is one a core.")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Also write all figures to this file.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Check that ranks stay in order and paths apart: simulation, mutants, public bugs, model.

    About a minute on two cores. The exit code is 1 if anything does not hold. With another number
    of seeds only they are run.
    """
    with one_line_errors(traceback):
        console = Console(highlight=False)
        if only_hazards:
            raise typer.Exit(0 if hazards.print_table(console) else FAILED)
        began_at, report = time.monotonic(), Report()
        if only_mutants:
            _mutants(report, console, workers, listed=True)
        else:
            _simulation(report, console, first_seed, seeds, workers)
            if seeds == SEEDS:
                _mutants(report, console, workers, listed=False)
                _hazards(report, console)
                _model(report, console)
                _tag_cost(report, console)
        report.figures["seconds"] = round(time.monotonic() - began_at, 1)
        _print(report, console)
        if as_json is not None:
            as_json.write_text(json.dumps(report.figures, indent=1) + "\n")
        if not report.holds:
            raise typer.Exit(FAILED)


def _simulation(report: Report, console: Console, first: int, num: int, workers: int) -> None:
    began_at = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task(f"seeds {first:,} to {first + num - 1:,}", total=num)
        tally = campaign.campaign(
            first,
            num,
            workers=workers,
            on_chunk=lambda chunk: progress.update(task, advance=chunk.seeds),
        )
    seconds = time.monotonic() - began_at
    report.notes += [what for _, what in tally.failures]
    report.add(
        "simulated runs of the shipped code",
        f"{tally.seeds:,} seeds, {len(tally.interleavings):,} distinct interleavings, "
        f"{tally.tickets:,} collectives, {len(tally.failures)} violations "
        f"({tally.seeds / seconds:.0f} seeds/s)",
        not tally.failures,
        seeds=tally.seeds,
        first_seed=first,
        interleavings=len(tally.interleavings),
        collectives=tally.tickets,
        steps=tally.steps,
        violations=[what for _, what in tally.failures],
        events=dict(sorted(tally.events.items())),
        faults=dict(sorted(tally.faults.items())),
    )
    for title, counted in (("of these runs", tally.events), ("faults, each named", tally.faults)):
        found = ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items()))
        report.add(title, found or "none", True)


def _mutants(report: Report, console: Console, workers: int, *, listed: bool) -> None:
    with console.status("mutants"):
        deaths = campaign.hunt_all(workers=workers)
    table = Table(title="Every rule, broken", title_justify="left")
    for heading in ("what the code does", "mutant", "seed", "found by"):
        table.add_column(heading, overflow="fold")
    for mutant, death in zip(MUTANTS, deaths, strict=True):
        if death is None:
            report.notes.append(f"mutant {mutant.name}: alive after all its seeds")
            table.add_row(mutant.rule, mutant.name, "-", "nothing", style="bold red")
        else:
            table.add_row(mutant.rule, mutant.name, str(death.seed), death.in_short)
    if listed:
        console.print(table)
    killed = sum(death is not None for death in deaths)
    report.add(
        "mutants killed",
        f"{killed} of {len(MUTANTS)}",
        killed == len(MUTANTS),
        mutants={
            mutant.name: None if death is None else {"seed": death.seed, "by": death.error}
            for mutant, death in zip(MUTANTS, deaths, strict=True)
        },
    )


def _hazards(report: Report, console: Console) -> None:
    total = len(HAZARDS)
    seen = []
    with _progress(console) as progress:
        task = progress.add_task("public bugs", total=total)
        for one in hazards.see_all():
            seen.append(one)
            progress.update(task, advance=1)
    for one in seen:
        if not one.reproduced:
            report.notes.append(
                f"hazard {one.hazard.row} ({one.hazard.title}): unsafe {one.unsafe.kind}, "
                f"ours {one.ours.kind}: {one.ours.evidence}"
            )
    num = sum(one.reproduced for one in seen)
    report.add(
        "public bugs reproduced, and not ours",
        f"{num} of {total}",
        num == total,
        hazards={str(one.hazard.row): one.reproduced for one in seen},
    )


def _model(report: Report, console: Console) -> None:
    with console.status("model"):
        found = model.check(MODEL_SECONDS)
    if found.unavailable:
        report.add("model states", found.unavailable, True, model=None)
        return
    report.notes += [f"model {outcome.name}: {outcome.found}" for outcome in found.failures]
    report.add(
        "model states",
        f"{found.states:,} in {found.num_bounds} bounds, "
        f"{found.num_killed} of {found.num_mutants} mutants killed",
        found.holds,
        model={
            "states": found.states,
            "bounds": found.num_bounds,
            "mutants": found.num_mutants,
            "killed": found.num_killed,
        },
    )


def _tag_cost(report: Report, console: Console) -> None:
    with console.status("tag cost"):
        cost = tag_cost.measure()
        for _ in range(2):  # a busy machine is measured again before it is believed
            if cost.share > tag_cost.LIMIT:
                cost = min(cost, tag_cost.measure(), key=lambda measured: measured.share)
    report.add(
        "cost of verification",
        f"{cost.share:.1%} of a step of {cost.step_s * 1e3:.1f} ms",
        cost.share <= tag_cost.LIMIT,
        tag_cost=round(cost.share, 4),
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _print(report: Report, console: Console) -> None:
    table = Table(title="interlace verify", title_justify="left", show_lines=True)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    table.add_column("")
    for what, found, holds in report.rows:
        table.add_row(what, found, "ok" if holds else "NO", style=None if holds else "bold red")
    console.print(table)
    for note in report.notes:
        console.print(note, style="red", markup=False)
    seconds = report.figures["seconds"]
    console.print(
        f"all of it holds ({seconds:.0f} s)"
        if report.holds
        else f"not all holds ({seconds:.0f} s)",
        style="green" if report.holds else "bold red",
    )
