"""Where does a step's time go on two ranks, and how near is each part to what the machine can do?

Two processes, each with the whole loop of a rank (scheduler, exchange, window, model, sampling);
the model is `bench-qwen3-moe`, attention data-parallel, experts spread over both. Each rank has the
rows that a shape names. Times are CPU seconds of a rank, so that what else the machine does shows
little; of all steps of a shape the quarter that took least is averaged, part by part. Only waiting
is wall time, and stands apart. Beside products, experts and attention stand the FLOPs and bytes
that they cannot do without, counted in the same run, and the share of the ceilings that they reach:
the arithmetic of the fastest large product seen (torch's without matrix tiles, as in a rank) and
the reading of 256 MiB, measured by all ranks at once.

Expect experts and products to be most of every step, at 90 % of a ceiling in prefill, and what is
neither arithmetic nor waiting to be a tenth of a decode step of 16 rows.

    python experiments/profile_step.py --out out/profile [--kernels avx512]     (make profile)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import matplotlib as mpl
import typer
from rich.console import Console
from rich.table import Table

from interlace.experiments.step_profile.parts import PARTS
from interlace.experiments.step_profile.rank import Shape, Steps, run_rank
from interlace.moe import kernels
from interlace.rollout.cache import BENCH_MODEL, model_folder

mpl.use("Agg")
import matplotlib.pyplot as plt

WORLD = 2
SHAPES = (
    Shape(path="decode", rows=1, context=560, steps=70),
    Shape(path="decode", rows=16, context=560, steps=70),
    Shape(path="decode", rows=32, context=560, steps=70),
    Shape(path="prefill", rows=384, context=384, steps=12),
    Shape(path="prefill", rows=512, context=512, steps=12),
)
COMPUTED = ("products", "experts", "block", "attention")
DARK = ("products", "block", "sampling", "dispatch", "Python")
FEWEST = 3
"""Steps that an average is taken of, at least."""


def profile(shapes: Sequence[Shape], model: str, instructions: str) -> dict[str, Any]:
    """Ceilings and steps as both ranks found them."""
    folder = str(model_folder(model))
    with tempfile.TemporaryDirectory(prefix="interlace-profile-") as name:
        store = str(Path(name) / "store")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORLD, mp_context=context) as pool:
            given = WORLD, store, folder, instructions, shapes
            ranks = [pool.submit(run_rank, rank, *given) for rank in range(WORLD)]
            found = [rank.result() for rank in ranks]
    ceilings = {key: mean(rank["ceilings"][key] for rank in found) for key in found[0]["ceilings"]}
    best = max(value for key, value in ceilings.items() if key != "bytes")
    return {
        "model": model,
        "ranks": WORLD,
        "kernels": kernels.instructions() or "none",
        "carrier": found[0]["carrier"],
        "load": os.getloadavg()[0],
        "ceilings": ceilings,
        "shapes": {
            shape.name: averaged(
                shape.name, [rank["shapes"][shape.name] for rank in found], best, ceilings["bytes"]
            )
            for shape in shapes
        },
    }


def averaged(name: str, ranks: Sequence[Steps], flops: float, num_bytes: float) -> dict[str, Any]:
    """Over the cheapest quarter of each rank's steps; milliseconds of one rank.

    Raises ValueError for a shape that no step of a rank had.
    """
    for rank, steps in enumerate(ranks):
        if not (steps.parts and steps.work):
            raise ValueError(
                f"{name}: rank {rank} timed {len(steps.parts)} steps of this shape and counted "
                f"{len(steps.work)}: its rows were never all there at once"
            )
    few = [cheapest(steps) for steps in ranks]
    chosen = [(steps.parts[at], steps.waited_s[at]) for steps, at_all in few for at in at_all]
    counted = [work for steps in ranks for work in steps.work]
    parts = {
        part: 1e3 * mean(parts.get(part, 0.0) for parts, _ in chosen)
        for part in PARTS
        if part != "waiting"
    }
    computed = {}
    for part in COMPUTED:
        if not parts[part]:
            continue
        work = {
            kind: mean(each[kind].get(part, 0.0) for each in counted) for kind in ("flops", "bytes")
        }
        at_best = 1e3 * max(work["flops"] / flops, work["bytes"] / num_bytes)
        computed[part] = {**work, "at_best_ms": at_best, "share": at_best / parts[part]}
    return {
        "steps": len(chosen),
        "cpu_ms": sum(parts.values()),
        "waited_ms": 1e3 * mean(waited for _, waited in chosen),
        "parts_ms": parts,
        "computed": computed,
        "at_best_ms": sum(each["at_best_ms"] for each in computed.values()),
    }


def cheapest(steps: Steps) -> tuple[Steps, list[int]]:
    def cost(at: int) -> float:
        return sum(s for part, s in steps.parts[at].items() if part != "waiting")

    order = sorted(range(len(steps.parts)), key=cost)
    return steps, order[: max(FEWEST, len(order) // 4)]


def table(report: dict[str, Any]) -> Table:
    shapes = report["shapes"]
    made = Table(title="one rank's step: CPU ms, share of the step; share of the nearer ceiling")
    made.add_column("part")
    for name in shapes:
        made.add_column(name, justify="right")
    for part in PARTS:
        if part == "waiting":
            continue
        cells = []
        for shape in shapes.values():
            ms = shape["parts_ms"][part]
            cell = f"{ms:.2f} {ms / shape['cpu_ms']:4.0%}"
            if part in shape["computed"]:
                cell += f" [{shape['computed'][part]['share']:.0%}]"
            cells.append(cell)
        made.add_row(part, *cells)
    made.add_section()
    made.add_row("all", *(f"{shape['cpu_ms']:.2f}" for shape in shapes.values()))
    made.add_row("at the ceilings", *(f"{shape['at_best_ms']:.2f}" for shape in shapes.values()))
    made.add_row("waiting, wall", *(f"{shape['waited_ms']:.2f}" for shape in shapes.values()))
    return made


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar of a whole step for each shape; a line marks what the ceilings would leave of it."""
    shapes = report["shapes"]
    figure, axis = plt.subplots(figsize=(11, 0.75 * len(shapes) + 1.9), layout="constrained")
    for place, shape in enumerate(shapes.values()):
        left = 0.0
        for part, colour in PARTS.items():
            share = shape["parts_ms"].get(part, 0.0) / shape["cpu_ms"]
            axis.barh(place, share, left=left, color=colour, height=0.66, label=part)
            if share > 0.045:
                middle = left + share / 2
                ink = "white" if part in DARK else "black"
                text = f"{share:.0%}"
                axis.text(middle, place, text, color=ink, ha="center", va="center", fontsize=8)
            left += share
        mark = shape["at_best_ms"] / shape["cpu_ms"]
        axis.plot([mark, mark], [place - 0.42, place + 0.42], color="black", linewidth=1.6)
    names = [
        f"{name} row{'s' * (not name.endswith(' 1'))}\n{shape['cpu_ms']:.1f} ms"
        for name, shape in shapes.items()
    ]
    axis.set_yticks(range(len(shapes)), names)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    shown = [part for part in PARTS if part != "waiting"]
    axis.legend(
        [handles[labels.index(part)] for part in shown],
        shown,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=6,
        frameon=False,
        fontsize=9,
    )
    axis.set_title(
        "CPU time of one rank's step; the line is where the machine's ceilings would end it",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(
    out: Annotated[Path, typer.Option(help="Folder for profile.json and profile.png.")],
    model: Annotated[str, typer.Option(help="A bfloat16 model with experts.")] = BENCH_MODEL,
    only: Annotated[list[str] | None, typer.Option(help="Some shapes, as 'decode 16'.")] = None,
    instructions: Annotated[str, typer.Option("--kernels", help="As model.kernels.")] = "auto",
) -> None:
    """Take the steps of two ranks apart."""
    if instructions not in {"auto", *kernels.NAMES}:
        names = ", ".join(kernels.NAMES)
        raise typer.BadParameter(f"there are no kernels {instructions!r}; there are auto, {names}")
    try:
        kernels.choose(instructions)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not kernels.instructions():
        raise typer.BadParameter("no kernels run here: interlace doctor says why")
    unknown = sorted({*(only or ())} - {shape.name for shape in SHAPES})
    if unknown:
        known = ", ".join(shape.name for shape in SHAPES)
        raise typer.BadParameter(f"there is no shape {unknown[0]!r}; there are {known}")
    shapes = [shape for shape in SHAPES if not only or shape.name in only]
    report = profile(shapes, model, instructions)
    out.mkdir(parents=True, exist_ok=True)
    (out / "profile.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, out / "profile.png")
    console = Console(highlight=False, width=200, markup=False)
    told = ", ".join(
        f"{key} {value / 1e9:.1f} {'GB/s' if key == 'bytes' else 'GFLOP/s'}"
        for key, value in report["ceilings"].items()
    )
    console.print(f"kernels {report['kernels']}, over {report['carrier']}; a rank at most: {told}")
    console.print(table(report))
    console.print(f"load {report['load']:.1f}; {out / 'profile.json'}, {out / 'profile.png'}")


if __name__ == "__main__":
    typer.run(main)
