"""`interlace ablate`: one workload, served in every way, by turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from interlace.rollout.ablation import machine_load
from interlace.rollout.ablation.arms import NAMES_HELP, Arm, parse_arms, split_present
from interlace.rollout.ablation.bench import Bench, Run, by_turns
from interlace.rollout.ablation.chunk_tuning import Tuning, tune
from interlace.rollout.ablation.comparison import Comparison
from interlace.rollout.ablation.page import page
from interlace.rollout.ablation.pictures import draw_all
from interlace.rollout.ablation.report import report
from interlace.rollout.ablation.request import Request, link_overrides
from interlace.rollout.ablation.rows import HEADINGS, notes, rows
from interlace.rollout.config_file import load_config
from interlace.rollout.workloads import describe, workload_names

from .errors import FAILED, Traceback, one_line_errors


def ablate(
    workload: Annotated[
        str, typer.Argument(help=f"A file, or one of {', '.join(workload_names())}.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")],
    arms: Annotated[
        str | None, typer.Option(help=f"By commas; all six modes by default. Each is {NAMES_HELP}.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 5,
    link: Annotated[
        str | None,
        typer.Option(
            help="A link between the ranks, as in 500us,2gbit: one for each path, or one for all "
            "with ,shared."
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="minute, full, or factors as in prompts=0.1,lengths=0.05.")
    ] = "minute",
    model: Annotated[str | None, typer.Option(help="Instead of the workload's.")] = None,
    sleep: Annotated[
        bool, typer.Option("--sleep/--no-sleep", help="Whether environments take their time.")
    ] = True,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the job."),
    ] = None,
    tune_chunk: Annotated[
        bool,
        typer.Option("--tune/--no-tune", help="Search the chunk with which chunked ends soonest."),
    ] = True,
    pictures: Annotated[
        bool, typer.Option("--traces", help="Also keep a trace and a timeline of every run.")
    ] = False,
    max_load: Annotated[
        float, typer.Option(help="A run is void where the load of others was higher.")
    ] = machine_load.LIMIT,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds a run waits for others to let go of the machine.")
    ] = 120.0,
    traceback: Traceback = False,
) -> None:
    """Serve one workload in every way, by turns, each run in a process of its own, and compare.

    Runs that are there already are not made again: stop it when you like, and call it again.
    The exit code is 1 if the digests differ, a run failed, or no pair of runs counts.
    """
    with one_line_errors(traceback):
        request = Request(
            workload=workload,
            scale=scale,
            model=model,
            sleep=sleep,
            overrides=(*(link_overrides(link) if link else ()), *(overrides or ())),
        )
        console = Console(highlight=False, soft_wrap=True)
        found = ablation(
            request,
            out,
            arms=arms,
            repeat=repeat,
            tune_chunk=tune_chunk,
            pictures=pictures,
            max_load=max_load,
            patience_s=patience,
            console=console,
        )
        show(found, console)
        console.print(f"report.html, report.json and pictures are in {out}", markup=False)
        if not found["sound"]:
            raise typer.Exit(FAILED)


def ablation(
    request: Request,
    out: Path,
    *,
    arms: str | None = None,
    repeat: int = 5,
    tune_chunk: bool = True,
    pictures: bool = False,
    max_load: float = machine_load.LIMIT,
    patience_s: float = 0.0,
    console: Console,
) -> dict[str, Any]:
    """Make the runs that are missing, write the report into `out`, and return it."""
    loaded = request.load()
    job = [*loaded.overrides, *request.overrides]
    world = load_config(overrides=job).layout.world
    present, absent = split_present(parse_arms(arms, world=world), job)
    for name, why in absent.items():
        console.print(f"absent: {name}: {why}", style="yellow", markup=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    with machine_load.LoadWatch() as watch, progress:
        row = progress.add_task("starting", total=len(present) * repeat)
        bench = Bench(
            out,
            request,
            watch=watch,
            max_load=max_load,
            patience_s=patience_s,
            tell=lambda text: progress.update(row, description=text),
        )
        bench.prepare()
        chosen, tuning = list(present), None
        if tune_chunk:
            chosen, tuning = _tuned(bench, present, console)
        runs: dict[Arm, list[Run]] = {arm: [] for arm in chosen}
        for number, arm in by_turns(chosen, repeat):
            run = bench.run(arm, number, pictures=pictures)
            runs[arm].append(run)
            progress.advance(row)
            console.print(_line(run, repeat), markup=False)
    compared = Comparison(runs=runs, absent=absent)
    found = report(
        compared, request, description=describe(loaded), tuning=tuning, max_load=max_load
    )
    drawn = draw_all(compared)
    for picture in drawn:
        picture.save_png(out / f"{picture.name}.png")
    (out / "report.html").write_text(page(found, drawn), encoding="utf-8")
    text = json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    return found


def _tuned(
    bench: Bench, present: dict[Arm, Any], console: Console
) -> tuple[list[Arm], Tuning | None]:
    """The arms, with chunked's chunk set to the best there is."""
    plain = next((arm for arm in present if arm.name == "chunked"), None)
    if plain is None:
        return list(present), None

    def measure(chunk: int) -> float | None:
        run = bench.run(_with_chunk(plain, chunk, f"chunked-{chunk}"), 0, where="tuning")
        if run.figures is None:
            return None
        seconds = float(run.figures["completion_s"])
        console.print(f"chunked with chunks of {chunk}: {seconds:.2f} s", markup=False)
        return seconds

    tuning = tune(present[plain].scheduler.chunk_tokens, measure)
    if tuning.best is None:
        return list(present), tuning
    best = _with_chunk(plain, tuning.best, plain.name)
    return [best if arm is plain else arm for arm in present], tuning


def _with_chunk(arm: Arm, chunk: int, name: str) -> Arm:
    return Arm(name=name, overrides=(*arm.overrides, f"scheduler.chunk_tokens={chunk}"))


def _line(run: Run, repeat: int) -> str:
    head = f"{run.repeat + 1}/{repeat} {run.arm.name}: "
    if run.figures is None:
        return f"{head}failed: {run.error}"
    void = ", VOID" if run.void else ""
    return f"{head}{run.figures['completion_s']:.2f} s, load of others {run.load:.1f}{void}"


def show(found: dict[str, Any], console: Console) -> None:
    """The table, what there is to know about it, and the verdict."""
    for headings, cells in _parts(rows(found)):
        table = Table(title_justify="left")
        table.add_column(headings[0], no_wrap=True, min_width=max(len(row[0]) for row in cells))
        for heading in headings[1:]:
            table.add_column(heading, justify="right")
        for row in cells:
            table.add_row(*row)
        console.print(table, soft_wrap=False)
    for line in notes(found):
        console.print(f"- {line}", markup=False)
    style = "bold" if found["sound"] else "bold red"
    console.print(found["verdict"], style=style, markup=False)


def _parts(
    cells: Sequence[tuple[str, ...]],
) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The table in parts that fit a terminal, each with the name of the arm."""
    if not cells:
        return []
    cuts = ((1, 6), (6, 12), (12, 15), (15, len(HEADINGS)))
    return [
        ((HEADINGS[0], *HEADINGS[a:b]), [(row[0], *row[a:b]) for row in cells]) for a, b in cuts
    ]
