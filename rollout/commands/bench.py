"""`interlace bench`: measurements against others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.bench import Bench, Run, by_turns
from interlace.rollout.cache import BENCH_MODEL
from interlace.rollout.peers.child import phase_of
from interlace.rollout.peers.comparison import PeerComparison
from interlace.rollout.peers.contestants import (
    BLOCK_SIZES,
    INTERLACE,
    PEERS,
    VLLM,
    VLLM_USUAL,
    arms_of,
    parse_peers,
    usable_cores,
    with_block_size,
)
from interlace.rollout.peers.picture import draw
from interlace.rollout.peers.process_tree import OthersWatch
from interlace.rollout.peers.report import HEADINGS, notes, report, rows
from interlace.rollout.peers.request import PeersRequest
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
        )
        console = Console(highlight=False, soft_wrap=True)
        found = comparison(
            request,
            out,
            peers=parse_peers(peers),
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
    peers: list[str],
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
    absent = {peer: why for peer in peers if (why := request.why_absent(peer)) is not None}
    for name, why in absent.items():
        console.print(f"absent: {name}: {why}", style="yellow", markup=False)
    present = [INTERLACE, *(peer for peer in peers if peer not in absent)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    arms = [arm for family in present for arm in arms_of(family)]
    row = progress.add_task("looking who else computes", total=repeat * len(arms))
    watch = OthersWatch()
    bench = Bench(
        out,
        request,
        watch=watch,
        max_load=max_load,
        patience_s=patience_s,
        tell=lambda text: progress.update(row, description=text),
        program=CHILD,
        progress=phase_of,
    )
    bench.prepare()
    with progress, watch:
        tried: dict[str, float | None] = {}
        if VLLM in present:
            arms, tried = _with_best_block_size(bench, arms, console)
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


def _with_best_block_size(
    bench: Bench, arms: list[Arm], console: Console
) -> tuple[list[Arm], dict[str, float | None]]:
    """The arms, those of vLLM with the size of blocks that was soonest; one run for each size."""
    tried: dict[str, float | None] = {}
    best, soonest = None, float("inf")
    for size in BLOCK_SIZES:
        word = "default" if size is None else str(size)
        arm = with_block_size(VLLM_USUAL, size, f"{VLLM_USUAL.name}-block-{word}")
        run = bench.run(arm, 0, where="tuning")
        tried[word] = seconds = None if run.figures is None else run.figures["completion_s"]
        told = f"failed: {run.error}" if seconds is None else f"{seconds:.2f} s"
        console.print(f"vLLM with blocks of size {word}: {told}", markup=False)
        if seconds is not None and seconds < soonest:
            best, soonest = size, seconds
    tuned = {arm: with_block_size(arm, best, arm.name) for arm in arms_of(VLLM)}
    return [tuned.get(arm, arm) for arm in arms], tried


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
    table = Table(caption=f"prefill, decode: tokens/s at batch {batches}", caption_justify="left")
    table.add_column(HEADINGS[0], no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in cells:
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    for line in notes(found):
        console.print(f"- {line}", markup=False)
