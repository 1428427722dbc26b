"""timeline.png: a run as a picture. Above, what each rank did all along; below, a close-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from interlace.rollout.figures import DECODE, PREFILL, TRANSFER, Records, engines, figures
from interlace.rollout.rank_time import shares_over_time, waits

COLOURS = {PREFILL: "#e8743b", DECODE: "#2f6db5"}
OTHER_COLOURS = ("#3a9d78", "#8a5aa8", "#b59b2f")
WAITING, HOST, INK = "#e6e8ec", "#a3abb6", "#30363d"
NUM_BINS = 200
CLOSE_UP_TICKETS = 32
"""About so many tickets of one rank fit the close-up and can still be told apart."""
MOST_RANKS = 8


def draw_timeline(path: str | Path, records: Records, *, mode: str) -> None:
    """Draw the run to a PNG file; `mode` is its name in the title.

    Above: per rank and slice of time, the shares spent computing for each path, in host code, and
    waiting. Below: a moment where the paths alternate most, one lane per rank and path, solid
    while computing, hatched while a collective is in flight, and a bar below while the rank ran
    host code or could only wait. Of many ranks the first eight are drawn. ValueError if the
    records disagree or hold no steps (see `figures`).
    """
    share = figures(records).coexisting_steps_share
    shown = {rank: records[rank] for rank in sorted(records)[:MOST_RANKS]}
    found = {ticket.path for _, tickets in records.values() for ticket in tickets}
    paths = sorted(
        found, key=lambda name: (list(COLOURS).index(name) if name in COLOURS else 9, name)
    )
    colours = dict(zip([p for p in paths if p not in COLOURS], OTHER_COLOURS, strict=False))
    colours |= COLOURS
    above = 1.1 + 0.42 * len(shown)
    below = 1.5 + 0.3 * len(shown) * (len(paths) + 1)
    picture = Figure(figsize=(13, above + below + 0.5), layout="constrained")
    FigureCanvasAgg(picture)
    halves: Any = picture.subfigures(2, 1, height_ratios=[above, below])
    upper, lower = halves
    title = f"{mode} on {len(records)} ranks"
    computing = [name for name in paths if name != TRANSFER]
    if len(computing) > 1:
        title += f": {' and '.join(computing)} coexist in {share:.0%} of steps"
    busy = {rank: own for rank, own in records.items() if own[1]}
    if (num := len(engines(busy))) > 1:
        title += f", in {num} engines that step apart"
    if TRANSFER in paths:
        title += ", on different ranks, in lock-step"
    picture.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    zero = min(steps[0].began_at for steps, _ in shown.values())
    close_up = _close_up(shown, zero)
    _draw_overview(upper, shown, paths, colours, zero, close_up)
    _draw_close_up(lower.add_subplot(), shown, paths, colours, zero, close_up)
    picture.savefig(path, dpi=130)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    start: float
    stop: float


def _close_up(records: Records, zero: float) -> _Window:
    """A typical stretch of the first rank's tickets among those with most changes of path."""
    steps, tickets = next(iter(records.values()))
    ordered = sorted(tickets, key=lambda ticket: ticket.seq)
    if not ordered:
        return _Window(start=0.0, stop=max(steps[-1].ended_at - zero, 1e-6))
    changes = np.cumsum([0, *(a.path != b.path for a, b in pairwise(ordered))])
    num = min(CLOSE_UP_TICKETS, len(ordered))
    per_window = changes[num - 1 :] - changes[: len(ordered) - num + 1]
    starts = np.array([ticket.resumed_at for ticket in ordered]) - zero
    stops = np.array([ticket.settled_at for ticket in ordered]) - zero
    most = np.flatnonzero(per_window >= 0.9 * per_window.max())
    lengths = stops[most + num - 1] - starts[most]
    first = int(most[np.argsort(lengths, kind="stable")[len(most) // 2]])
    start, stop = float(starts[first]), float(stops[first : first + num].max())
    margin = max(stop - start, 1e-6) * 0.01
    return _Window(start=start - margin, stop=stop + margin)


def _draw_overview(
    figure: Any,
    records: Records,
    paths: Sequence[str],
    colours: dict[str, str],
    zero: float,
    close_up: _Window,
) -> None:
    end = max(steps[-1].ended_at for steps, _ in records.values()) - zero
    unit, scale = _unit(end)
    edges = np.linspace(0.0, max(end, 1e-6), NUM_BINS + 1)
    axes = figure.subplots(len(records), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (rank, (steps, tickets)) in zip(axes, records.items(), strict=True):
        shares = shares_over_time(steps, tickets, paths, edges + zero)
        level = np.zeros(NUM_BINS)
        for name, share in shares.items():
            top = np.minimum(level + share, 1.0)
            colour = colours.get(name, HOST)
            for_step = [np.append(values, values[-1]) for values in (level, top)]
            axis.fill_between(edges * scale, *for_step, step="post", color=colour, linewidth=0)
            level = top
        axis.set_facecolor(WAITING)
        axis.axvspan(
            close_up.start * scale, close_up.stop * scale, facecolor="none", edgecolor=INK, lw=0.8
        )
        axis.set_ylim(0, 1)
        axis.set_xlim(0, edges[-1] * scale)
        axis.set_yticks([])
        axis.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", color=INK)
        axis.spines[:].set_visible(False)
        axis.tick_params(bottom=axis is axes[-1], colors=INK)
    axes[-1].set_xlabel(f"time since the first step ({unit})", color=INK)
    axes[0].set_title("share of each rank's time", loc="left", fontsize=10.5, color=INK)
    patches = [Patch(color=colours[name], label=f"{name} computes") for name in paths]
    patches += [Patch(color=HOST, label="host code"), Patch(color=WAITING, label="waits")]
    patches.append(Patch(facecolor="none", edgecolor=INK, lw=0.8, label="close-up below"))
    _legend(figure, patches)


def _draw_close_up(
    axis: Any,
    records: Records,
    paths: Sequence[str],
    colours: dict[str, str],
    zero: float,
    window: _Window,
) -> None:
    unit, scale = _unit(window.stop - window.start)
    width = (window.stop - window.start) * scale
    origin = zero + window.start

    def bars(
        spans: Sequence[tuple[float, float]], middle: float, height: float, **look: Any
    ) -> None:
        inside = [
            ((a - origin) * scale, (b - a) * scale)
            for a, b in spans
            if b > origin and a < zero + window.stop
        ]
        axis.broken_barh(inside, (middle - height / 2, height), **look)

    ticks, names, lane = [], [], 0.0
    for rank, (steps, tickets) in records.items():
        top = lane - 0.55
        for name in paths:
            own = [ticket for ticket in tickets if ticket.path == name]
            bars(
                [(t.posted_at, t.settled_at) for t in own],
                lane,
                0.5,
                facecolor="white",
                edgecolor=colours[name],
                hatch="//////",
                linewidth=0.0,
                alpha=0.45,
            )
            bars([span for t in own for span in t.computing], lane, 0.8, facecolor=colours[name])
            ticks.append(lane)
            names.append(f"rank {rank}  {name}" if name == paths[0] else name)
            lane += 1.0
        below = lane - 0.42
        bars([(steps[0].began_at, steps[-1].ended_at)], below, 0.16, facecolor=HOST)
        computed = [span for ticket in tickets for span in ticket.computing]
        bars(computed, below, 0.2, facecolor="white", edgecolor="white", linewidth=0.5)
        bars(waits(steps, tickets), below, 0.16, facecolor=INK)
        labelled = -1.0
        for step in steps:
            at = (step.began_at - origin) * scale
            if not 0 <= at <= width:
                continue
            axis.plot([at, at], [top, lane - 0.3], color=INK, linewidth=0.8, linestyle=":")
            if rank == min(records) and labelled < at < 0.96 * width:
                axis.text(
                    at + 0.002 * width, top - 0.05, f"step {step.step}", fontsize=8, color=INK
                )
                labelled = at + 0.06 * width
        lane += 0.55
    axis.set_ylim(lane - 0.4, -1.15)
    axis.set_xlim(0, width)
    axis.set_yticks(ticks, names)
    axis.tick_params(left=False, colors=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel(f"{unit}, from {max(window.start, 0.0):.3f} s on", color=INK)
    axis.set_title(
        "close-up where paths alternate most" if len(paths) > 1 else "close-up",
        loc="left",
        fontsize=10.5,
        color=INK,
    )
    patches = [Patch(color=colours[name], label=f"{name} computes") for name in paths]
    patches.append(
        Patch(facecolor="white", edgecolor=HOST, hatch="//////", lw=0, label="collective in flight")
    )
    patches += [Patch(color=HOST, label="host code"), Patch(color=INK, label="can only wait")]
    _legend(axis.figure, patches)


def _legend(figure: Any, patches: list[Patch]) -> None:
    figure.legend(
        handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=9
    )


def _unit(seconds: float) -> tuple[str, float]:
    """A unit in which the span is a number one can read, and its count per second."""
    if seconds >= 2.0:
        return "s", 1.0
    return ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
