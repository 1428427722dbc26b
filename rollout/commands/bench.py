"""`interlace bench`: measurements against others."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.bench import Bench, Run, by_turns
from interlace.rollout.cache import BENCH_MODEL
from interlace.rollout.peers.block_size import Tried, tried_sizes, with_soonest_size
from interlace.rollout.peers.child import phase_of
from interlace.rollout.peers.comparison import PeerComparison
from interlace.rollout.peers.contestants import (
    INTERLACE,
    PEERS,
    VLLM,
    family_of,
    parse_arms,
    parse_peers,
    usable_cores,
)
from interlace.rollout.peers.picture import draw
from interlace.rollout.peers.process_tree import OthersWatch
from interlace.rollout.peers.report import HEADINGS, notes, report, rows, which
from interlace.rollout.peers.request import PeersRequest
from interlace.rollout.peers.tiles import without_tiles
from interlace.rollout.peers.workload import Shape

from .errors import FAILED, Traceback, one_line_errors

app = typer.Typer(help="Measure against others.", no_args_is_help=True)
CHILD = (sys.executable, "-m", "interlace.rollout.peers.child")
MAX_LOAD = 0.2


@app.callback()
def bench() -> None:
    """Measure against others."""


@app.command()
def peers(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")],
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each way to run an engine.")] = 5,
    peers: Annotated[
        str | None, typer.Option(help=f"By commas, of {', '.join(PEERS)}; all by default.")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="By commas, of the arms that docs/peers.md names; all by default."),
    ] = None,
    tiles: Annotated[
        bool,
        typer.Option(
            "--tiles/--no-tiles",
            help="Let everybody use the processor's matrix tiles (AMX), or nobody.",
        ),
    ] = True,
    installed: Annotated[
        Path, typer.Option(help="Where `make peers` has put the other engines.")
    ] = Path("build/peers"),
    trajectories: Annotated[
        int, typer.Option(min=1, max=32, help="Fewer make a short trial.")
    ] = Shape().num_trajectories,
    model: Annotated[
        str, typer.Option(help="A name or a folder; llama-cpp has only the usual one.")
    ] = BENCH_MODEL,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value of Interlace's job."),
    ] = None,
    max_load: Annotated[
        float, typer.Option(help="A run is void where others kept more cores busy.")
    ] = MAX_LOAD,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds a run waits for others to let go of the machine.")
    ] = 600.0,
    traceback: Traceback = False,
) -> None:
    """One model and one rollout of many turns, played by every engine on two cores, by turns.

    Runs that are there already are not made again: stop it when you like, and call it again.
    The exit code is 1 if an engine that is installed fails, or if Interlace's tokens differ from
    run to run.
    """
    with one_line_errors(traceback):
        request = PeersRequest(
            installed=installed.absolute(),
            model=model,
            shape=Shape(num_trajectories=trajectories),
            overrides=tuple(overrides or ()),
            tiles=tiles,
        )
        console = Console(highlight=False, soft_wrap=True)
        found = comparison(
            request,
            out,
            arms=parse_arms(arms, [INTERLACE, *parse_peers(peers)]),
            repeat=repeat,
            max_load=max_load,
            patience_s=patience,
            console=console,
        )
        show(found, console)
        console.print(f"peers.json and peers.png are in {out}", markup=False)
        if not found["sound"]:
            raise typer.Exit(FAILED)


def comparison(
    request: PeersRequest,
    out: Path,
    *,
    arms: Sequence[Arm],
    repeat: int = 5,
    max_load: float = MAX_LOAD,
    patience_s: float = 0.0,
    console: Console,
) -> dict[str, Any]:
    """Make the runs that are missing, write peers.json and peers.png into `out`, return the former.

    ConfigError if Interlace's job cannot be, or `out` holds something else.
    """
    request.config()
    usable_cores()
    peers = [peer for peer in PEERS if any(family_of(arm) == peer for arm in arms)]
    absent = {peer: why for peer in peers if (why := request.why_absent(peer)) is not None}
    for name, why in absent.items():
        console.print(f"absent: {name}: {why}", style="yellow", markup=False)
    arms = [arm for arm in arms if family_of(arm) not in absent]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    row = progress.add_task("looking who else computes", total=repeat * len(arms))
    watch = OthersWatch()
    bench = Bench(
        out,
        request,
        watch=watch,
        max_load=max_load,
        patience_s=patience_s,
        tell=lambda text: progress.update(row, description=text),
        program=CHILD if request.tiles else without_tiles(CHILD),
        progress=phase_of,
    )
    bench.prepare()
    with progress, watch:
        tried: Tried = {}
        if any(family_of(arm) == VLLM for arm in arms):
            tried = tried_sizes(
                out,
                lambda arm: bench.run(arm, 0, where="tuning"),
                lambda line: console.print(line, markup=False),
            )
            arms = with_soonest_size(arms, tried)
        runs: dict[Arm, list[Run]] = {arm: [] for arm in arms}
        for number, arm in by_turns(arms, repeat):
            run = bench.run(arm, number)
            runs[arm].append(run)
            progress.advance(row)
            console.print(_line(run, repeat), markup=False)
    compared = PeerComparison(runs=runs, absent=absent)
    found = report(compared, request, block_sizes=tried, max_load=max_load)
    draw(found, out / "peers.png")
    text = json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)
    (out / "peers.json").write_text(text + "\n", encoding="utf-8")
    return found


def _line(run: Run, repeat: int) -> str:
    head = f"{run.repeat + 1}/{repeat} {run.arm.name}: "
    if run.figures is None:
        return f"{head}failed: {run.error}"
    void = ", VOID" if run.void else ""
    return f"{head}{run.figures['completion_s']:.2f} s, others keep {run.load:.2f} cores busy{void}"


def show(found: dict[str, Any], console: Console) -> None:
    """The table, and what came out."""
    cells = rows(found)
    batches = " / ".join(str(batch) for batch in found["request"]["shape"]["batches"])
    table = Table(
        title=which(found),
        caption=f"prefill, decode: tokens/s at batch {batches}",
        caption_justify="left",
    )
    table.add_column(HEADINGS[0], no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in cells:
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    for line in notes(found):
        console.print(f"- {line}", markup=False)
