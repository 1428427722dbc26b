"""curve.png: success over iterations of all runs, and the gap beside its bar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .record import Outcome, Plan

INK, PALE = "#30363d", "#e6e8ec"
BARRIER = ("#2d6cb5", "#5d93cf", "#97bbe3", "#1d4680")
IN_FLIGHT = "#e8743b"
REPEATED = "#101418"


def draw_curves(
    path: Path, runs: Mapping[str, Outcome], *, goal: float, gap_bar: float, title: str
) -> None:
    """Draw the runs, each under its name, to a PNG file; a run made again is dashed."""
    picture = Figure(figsize=(11.5, 4.6), layout="constrained")
    FigureCanvasAgg(picture)
    success: Any
    gap: Any
    success, gap = picture.subplots(1, 2, width_ratios=(3, 2))
    drawn: list[Plan] = []
    for name, run in runs.items():
        again = run.plan in drawn
        drawn += [] if again else [run.plan]
        at = [iteration.number for iteration in run.iterations]
        flight = run.plan.in_flight
        colour = IN_FLIGHT if flight else BARRIER[drawn.index(run.plan) % len(BARRIER)]
        colour = REPEATED if again else colour
        style = {"color": colour, "linewidth": 1.8, "linestyle": "--" if again else "-"}
        success.plot(at, [one.success for one in run.iterations], label=name, **style)
        if flight and not again:
            _plot_lags(gap, run, colour)
        elif not flight:
            gap.plot(at, [one.largest_gap for one in run.iterations], **style)
    success.axhline(goal, color=INK, linewidth=0.8, linestyle=":")
    success.set_ylim(0, 1.02)
    success.set_yticks(
        [0, 0.25, 0.5, 0.75, goal], ["0", "25 %", "50 %", "75 %", f"{100 * goal:.0f} %"]
    )
    success.set_title("episodes that reach the goal", loc="left", color=INK, fontsize=10)
    gap.axhline(gap_bar, color=INK, linewidth=0.8, linestyle=":")
    gap.set_yscale("log")
    gap.set_title(
        "largest gap to the trainer, nats\nlines: at a barrier; marks: in flight, by KV lag",
        loc="left",
        color=INK,
        fontsize=10,
    )
    for axes in (success, gap):
        axes.set_xlabel("iteration", color=INK)
        axes.grid(axis="y", color=PALE)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    success.legend(frameon=False, loc="lower right", fontsize=9)
    picture.suptitle(title, x=0.01, ha="left", color=INK, fontweight="bold")
    picture.savefig(path, dpi=130)


def _plot_lags(axes: Any, run: Outcome, colour: str) -> None:
    lags = sorted({lag for iteration in run.iterations for lag in iteration.gap})
    for lag in lags:
        points = [(one.number, one.gap[lag].largest) for one in run.iterations if lag in one.gap]
        at, values = zip(*points, strict=True)
        marker = "ox^s"[lag % 4]
        axes.scatter(at, values, s=14, color=colour, marker=marker, label=f"lag {lag}")
    axes.legend(frameon=False, fontsize=8)
