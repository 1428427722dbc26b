"""Does multiplexing pay on this machine? Serial against multiplexed, the same job, in turn.

    python experiments/bench_modes.py --out out/modes [--preset demo] [--repeats 5]

Every run is a fresh `interlace rollout` process; the modes alternate, so that a machine whose speed
drifts treats both alike, and what counts are the ratios of neighbouring runs. A run that is there
already is not repeated: stop it when you like and call it again.

Expected: the same digest in every run, decode that waits for 1 boundary instead of many, and over
gloo NO gain in completion time. gloo moves bytes in threads that need the cores the ranks compute
on, so nothing travels for free; ranks that hide transfers need a transport that moves bytes by
itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from rich.console import Console
from rich.table import Table

from interlace.rollout.ablation.statistics import paired_ratio, ratio_words

mpl.use("Agg")
from matplotlib import pyplot as plt

MODES = ("serial", "multiplexed")
FIGURES = {
    "wall_s": "wall time (s)",
    "cpu_s": "CPU time of ranks (s)",
    "idle": "idle share",
    "tokens_per_s": "sampled tokens/s",
    "decode_gap_max": "longest decode wait (boundaries)",
    "coexisting_steps_share": "steps with P and D",
}


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")],
    preset: Annotated[str, typer.Option(help="Job to run.")] = "demo",
    repeats: Annotated[int, typer.Option(min=2, help="Runs of each mode.")] = 5,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Passed on to interlace rollout.")
    ] = None,
) -> None:
    """Run what is missing, then report."""
    console = Console(highlight=False)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode in MODES:
            folder = out / f"{mode}-{repeat}"
            if not (folder / "summary.json").is_file():
                console.print(f"run {repeat + 1} of {repeats}, {mode}")
                _run(folder, preset, [*(overrides or ()), f"mode={mode}"])
            summary = json.loads((folder / "summary.json").read_text())
            summary["idle"] = statistics.fmean(summary["idle_share"].values())
            runs[mode].append(summary)
    report = _report(runs)
    (out / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    _draw(runs, report, out / "bench.png")
    console.print(_table(report))
    console.print(report["verdict"])
    console.print(
        "over gloo no gain in completion time is expected: its threads move the bytes on the cores "
        "that the ranks compute on"
    )
    console.print(f"report in {out / 'bench.json'}, picture in {out / 'bench.png'}")


def _run(folder: Path, preset: str, overrides: Sequence[str]) -> None:
    sets = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "interlace.rollout.cli", "rollout", "--preset", preset]
    done = subprocess.run(
        [*command, *sets, "--out", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout}\n{done.stderr}")


def _report(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    digests = {run["digest"] for many in runs.values() for run in many}
    figures = {}
    for name in FIGURES:
        columns = {mode: [run[name] for run in runs[mode]] for mode in MODES}
        ratio = paired_ratio(columns["multiplexed"], columns["serial"])
        figures[name] = {
            **{mode: statistics.median(values) for mode, values in columns.items()},
            "ratio": None if ratio is None else ratio.as_json(),
        }
    low, high = (figures["wall_s"]["ratio"][end] for end in ("low", "high"))
    if len(digests) > 1:
        verdict = f"DIGESTS DIFFER: {sorted(digests)}"
    elif low <= 1 <= high:
        verdict = "no difference in completion time that these runs could show; one digest"
    else:
        word = "shorter" if high < 1 else "longer"
        verdict = f"completion is {word} multiplexed, {low:.3f} to {high:.3f} of serial; one digest"
    return {
        "runs": {mode: [run["wall_s"] for run in many] for mode, many in runs.items()},
        "figures": figures,
        "digests": sorted(digests),
        "verdict": verdict,
        "load": os.getloadavg()[0],
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table(title="medians, and the ratio multiplexed / serial with its 95 % interval")
    for column in ("", *MODES, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, words in FIGURES.items():
        row, ratio = report["figures"][name], report["figures"][name]["ratio"]
        table.add_row(words, *(f"{row[mode]:.3g}" for mode in MODES), ratio_words(ratio))
    return table


def _draw(runs: dict[str, list[dict[str, Any]]], report: dict[str, Any], path: Path) -> None:
    shown = ("wall_s", "cpu_s", "idle", "decode_gap_max")
    figure, axes = plt.subplots(1, len(shown), figsize=(12, 3.4), layout="constrained")
    for axis, name in zip(axes, shown, strict=True):
        for place, (mode, colour) in enumerate(zip(MODES, ("#9aa5b1", "#2d6cb5"), strict=True)):
            values = [run[name] for run in runs[mode]]
            axis.bar(place, statistics.median(values), color=colour, width=0.6)
            axis.scatter([place] * len(values), values, color="black", s=12, zorder=3)
        axis.set_xticks(range(len(MODES)), MODES)
        axis.set_title(FIGURES[name], fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    figure.suptitle(report["verdict"], fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
