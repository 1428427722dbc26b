"""What does exactness cost, beside the best that keeps no bits?

The bench model on one rank and one thread, three times, by turns in one process, with the same
weights and inputs:

* framed: our exact kernels as ranks run them, with coroutines and the dispatch between ranks;
* plain: the same kernels and the same bits in a plain loop;
* best: the same loop with the fastest way found for each part and shape if no bits are kept:
  torch's products (oneDNN with packed weights, `F.linear`), its attention over keys and values that
  lie in one piece, experts added up as they come, or our own kernels where those are faster.

So plain / best is what exactness costs, and framed / best what it costs together with the frame.
Ratios are medians over turns. Where the processor has matrix tiles (AMX) all is measured twice:
without them, and with.

Expect plain / best of at most 1.05 either way.

    python experiments/exactness_price.py --out out/exactness
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from interlace.experiments.exactness.price import PARTS, prices
from interlace.experiments.exactness.shape import Shape
from interlace.moe import kernels
from interlace.rollout.ablation.statistics import ratio_words
from interlace.rollout.cache import BENCH_MODEL, model_folder

SHAPES = (
    *(Shape(sequences=n, start=start, rows=1) for n in (1, 8, 32) for start in (256, 1024)),
    *(Shape(sequences=1, start=0, rows=rows) for rows in (128, 512)),
)
ONEDNN = "ONEDNN_MAX_CPU_ISA"
VECTORS, TILES = "vector instructions", "matrix tiles"
LIMITS = {VECTORS: "AVX512_CORE_BF16", TILES: "DEFAULT"}


def instruction_sets() -> list[str]:
    """What all three are measured with here."""
    return [VECTORS, TILES] if torch.cpu.get_capabilities().get("amx_bf16") else [VECTORS]


def priced(instructions: str, *args: Any) -> None:
    """The prices, with our kernels on the same instructions as oneDNN."""
    without_tiles = instructions == VECTORS and len(instruction_sets()) > 1
    kernels.choose("avx512" if without_tiles else "auto")
    prices(*args)


def measured(
    folder: Path, shapes: Sequence[Shape], rounds: int, instructions: str
) -> Iterator[dict[str, Any]]:
    """The ceilings, then each shape, from a process of its own: oneDNN chooses its instructions
    once. RuntimeError if it ends."""
    context = multiprocessing.get_context("spawn")
    heard, say = context.Pipe(duplex=False)
    before = os.environ.get(ONEDNN)
    os.environ[ONEDNN] = LIMITS[instructions]
    process = context.Process(
        target=priced, args=(instructions, str(folder), shapes, rounds, say.send), daemon=True
    )
    try:
        process.start()
    finally:
        if before is None:
            del os.environ[ONEDNN]
        else:
            os.environ[ONEDNN] = before
    say.close()
    try:
        for _ in range(1 + len(shapes)):
            yield heard.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the process that measures ended with {process.exitcode}: its error is above"
        ) from None
    process.join()


def report(folder: Path, shapes: Sequence[Shape], rounds: int, console: Console) -> dict[str, Any]:
    """Everything measured, by instructions."""
    found: dict[str, dict[str, Any]] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        for instructions in instruction_sets():
            task = progress.add_task(instructions, total=len(shapes))
            each = measured(folder, shapes, rounds, instructions)
            found[instructions] = {"ceilings": next(each), "prices": (shown := [])}
            for one in each:
                shown.append(one)
                progress.advance(task)
    return {
        "model": folder.name,
        "kernels": kernels.instructions(),
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "instructions": found,
    }


def table(instructions: str, found: dict[str, Any]) -> Table:
    """One row for each part of each shape."""
    told = ", ".join(
        f"{name} {value / 1e9:.0f} {'GB/s' if name == 'bytes' else 'GFLOP/s'}"
        for name, value in found["ceilings"].items()
    )
    made = Table(
        title=f"CPU ms of all layers, with {instructions}; best is what keeps no bits\n{told}"
    )
    made.add_column("shape")
    made.add_column("part")
    for column in ("framed", "plain", "best", "framed / best", "plain / best"):
        made.add_column(column, justify="right")
    made.add_column("the best one's way")
    for one in found["prices"]:
        for part in PARTS:
            row = one["parts"][part]
            made.add_row(
                one["shape"] if part == PARTS[0] else "",
                part,
                *(f"{row[f'{name}_ms']:.3g}" for name in ("framed", "plain", "best")),
                *(ratio_words(row[f"{name}_to_best"]) for name in ("framed", "plain")),
                one["ways"].get(part, ""),
            )
        made.add_section()
    return made


def main(
    out: Annotated[Path, typer.Option(help="Folder for exactness_price.json.")],
    model: Annotated[str, typer.Option(help="A bfloat16 Qwen3-MoE.")] = BENCH_MODEL,
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 9,
    only: Annotated[list[str] | None, typer.Option(help="Some shapes, as 'prefill 512'.")] = None,
) -> None:
    """Measure every part of every shape, exact and otherwise."""
    if not kernels.instructions():
        raise typer.BadParameter("no kernels run here: interlace doctor says why")
    known = [shape.name for shape in SHAPES]
    unknown = sorted({*(only or ())} - {*known})
    if unknown:
        raise typer.BadParameter(f"there is no shape {unknown[0]!r}; there are {', '.join(known)}")
    console = Console(highlight=False, width=150)
    shapes = [shape for shape in SHAPES if not only or shape.name in only]
    found = report(model_folder(model), shapes, rounds, console)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "exactness_price.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for instructions, shown in found["instructions"].items():
        console.print(table(instructions, shown))
    console.print(f"kernels {found['kernels']}; load {found['load']:.1f}; {path}")


if __name__ == "__main__":
    typer.run(main)
