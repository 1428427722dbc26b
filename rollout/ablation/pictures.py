"""The pictures of an ablation, each as PNG and as SVG for a page in light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from interlace.rollout.timeline import COLOURS, HOST, INK, WAITING

from .comparison import Comparison, completion_s, cpu_s

MIXED, TRANSFER, PARKED = "#3a9d78", "#8a5aa8", "#f4f5f7"
PATH_COLOURS = {**COLOURS, "mixed": MIXED, "transfer": TRANSFER}
_OTHER_PATH = "#b59b2f"
_ARM_COLOURS = {
    "serial": "#8b95a1",
    "chunked": MIXED,
    "whole_forward": TRANSFER,
    "multiplexed": "#2f6db5",
    "disaggregated": "#b59b2f",
    "replicas": "#c2574a",
}
_MORE_COLOURS = ("#4fa3c7", "#d98bb0", "#7c8f3a", "#6b6fd0", "#e0a458")
_REST = ("host code", "waits for others", "no work")
_WORDS = {
    "prefill": "prefill computes",
    "decode": "decode computes",
    "mixed": "both in one batch",
    "transfer": "transfers",
}

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str
    title: str
    caption: str
    figure: Figure

    def save_png(self, path: Path) -> None:
        with _style(self.name):
            self.figure.savefig(path, dpi=130, facecolor="white")

    @property
    def svg(self) -> str:
        """An element for a page: no background, names of its own, colours as CSS variables."""
        with _style(self.name), io.StringIO() as out:
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
            text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'\bid="', f'id="{self.name}-', text)
        text = re.sub(r"url\(#", f"url(#{self.name}-", text)
        text = re.sub(r'href="#', f'href="#{self.name}-', text)
        for colour, variable in _VARIABLES.items():
            text = re.sub(colour, f"var({variable})", text, flags=re.IGNORECASE)
        label = f'role="img" aria-label="{self.title}"'
        return text.replace("<svg ", f"<svg {label} ", 1)


_VARIABLES = {INK: "--ink", WAITING: "--waiting", PARKED: "--parked", HOST: "--host"}


def draw_all(compared: Comparison) -> list[Picture]:
    """Nothing without an arm that counts."""
    if not compared.arms:
        return []
    colours = arm_colours(compared)
    return [
        _completion(compared, colours),
        _shares(compared),
        _curves(compared, colours),
        _timelines(compared),
    ]


def arm_colours(compared: Comparison) -> dict[str, str]:
    more = cycle(_MORE_COLOURS)
    return {
        arm.name: _ARM_COLOURS[arm.name] if arm.name in _ARM_COLOURS else next(more)
        for arm in compared.runs
    }


def _style(salt: str) -> Any:
    return mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10, "hatch.linewidth": 0.8}
    )


def _canvas(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _completion(compared: Comparison, colours: Mapping[str, str]) -> Picture:
    arms, reference = compared.arms, compared.reference
    figure = _canvas(11, 1.3 + 0.44 * len(arms))
    axes: Any = figure.subplots(1, 3, sharey=True, width_ratios=[1.15, 1.15, 1])
    places = np.arange(len(arms))
    columns: list[tuple[Any, Callable[[Figures], float], str]] = [
        (axes[0], completion_s, "completion (s)"),
        (axes[2], cpu_s, "CPU of all ranks (s)"),
    ]
    for axis, of, title in columns:
        for place, arm in zip(places, arms, strict=True):
            values = compared.column(arm, of)
            axis.barh(place, median(values), color=colours[arm.name], height=0.62)
            axis.scatter(values, [place] * len(values), s=14, color=INK, zorder=3, linewidths=0)
        axis.set_xlim(0, 1.04 * max(max(compared.column(arm, of)) for arm in arms))
        _finish(axis, title)
    for place, arm in zip(places, arms, strict=True):
        ratio = compared.ratio(arm, reference, completion_s) if reference else None
        if arm is reference or ratio is None:
            continue
        axes[1].plot([ratio.low, ratio.high], [place, place], color=colours[arm.name], lw=4)
        axes[1].plot(ratio.median, place, "o", color=INK, ms=5)
        axes[1].annotate(
            f"{ratio.median:.3f}",
            (ratio.median, place),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=INK,
        )
    axes[1].axvline(1.0, color=INK, lw=0.9, ls=":")
    low, high = axes[1].get_xlim()
    margin = max(0.02, 0.08 * (high - low))
    axes[1].set_xlim(min(low, 1.0) - margin, max(high, 1.0) + margin)
    name = reference.name if reference else "-"
    _finish(axes[1], f"ratio to {name}, 95 % interval")
    axes[0].set_yticks(places, [arm.name for arm in arms])
    axes[0].set_ylim(len(arms) - 0.4, -0.75)
    return Picture(
        name="completion",
        title="Completion",
        caption="Bars are medians, dots the runs. A ratio pairs runs of one turn; its interval is "
        "a bootstrap of the median.",
        figure=figure,
    )


def _shares(compared: Comparison) -> Picture:
    arms = compared.arms
    figure = _canvas(11, 1.5 + 0.42 * len(arms))
    axis: Any = figure.subplots()
    shown: dict[str, str] = {}
    for place, arm in enumerate(arms):
        figures = compared.figures(arm)
        left = 0.0
        for name, share, colour, label in _parts(figures):
            axis.barh(place, share, left=left, color=colour, height=0.62)
            shown.setdefault(label, colour)
            if share > 0.045:
                dark = name in PATH_COLOURS
                axis.text(
                    left + share / 2,
                    place,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if dark else INK,
                )
            left += share
        overlap = _mean_share(figures, "overlap")
        axis.text(1.01, place, f"{overlap:.0%}", va="center", fontsize=9, color=INK, clip_on=False)
    axis.text(1.01, -0.72, "overlap", va="center", fontsize=9, color=INK)
    axis.set_xlim(0, 1)
    axis.set_ylim(len(arms) - 0.4, -1.0)
    axis.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    _finish(axis, "where the ranks' time went")
    ordered = sorted(shown, key=lambda label: label in _REST)
    patches = [Patch(color=shown[label], label=label) for label in ordered]
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=len(patches),
        columnspacing=1.3,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return Picture(
        name="shares",
        title="Where the time went",
        caption="Mean over ranks. Overlap: the share of time in which a rank computes for one path "
        "while a collective of another is in flight. No work: steps in which no rank had any.",
        figure=figure,
    )


def _parts(figures: Sequence[Figures]) -> list[tuple[str, float, str, str]]:
    paths = [name for name in figures[0]["paths"] if name in PATH_COLOURS]
    paths.sort(key=list(PATH_COLOURS).index)
    paths += [name for name in figures[0]["paths"] if name not in PATH_COLOURS]
    parts = [
        (
            name,
            _mean_share(figures, name),
            PATH_COLOURS.get(name, _OTHER_PATH),
            _WORDS.get(name, f"{name} computes"),
        )
        for name in paths
    ]
    parked = _mean_share(figures, "parked")
    return [
        *parts,
        ("host", _mean_share(figures, "host"), HOST, "host code"),
        ("waits", _mean_share(figures, "idle") - parked, WAITING, "waits for others"),
        ("parked", parked, PARKED, "no work"),
    ]


def _mean_share(figures: Sequence[Figures], name: str) -> float:
    return median(
        float(np.mean([rank.get(name, 0.0) for rank in one["ranks"].values()])) for one in figures
    )


def _curves(compared: Comparison, colours: Mapping[str, str]) -> Picture:
    figure = _canvas(11, 3.9)
    axes: Any = figure.subplots(1, 2, sharey=True)
    for arm in compared.arms:
        one = _typical(compared.figures(arm))
        curve, bulk = one["curve"], one["tail"]["bulk_s"]
        for axis, name in zip(axes, ("tokens", "trajectories"), strict=True):
            axis.plot(
                curve["seconds"], curve[name], color=colours[arm.name], lw=1.8, label=arm.name
            )
        at = float(np.interp(bulk, curve["seconds"], curve["tokens"]))
        axes[0].plot(bulk, at, "o", color=colours[arm.name], ms=5)
    for axis, title in zip(axes, ("tokens sampled", "trajectories finished"), strict=True):
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.02)
        axis.set_yticks(
            [0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "25 %", "50 %", "75 %", "90 %", "100 %"]
        )
        axis.grid(axis="y", color=WAITING, lw=0.8)
        axis.set_axisbelow(True)
        axis.set_xlabel("seconds", color=INK)
        _finish(axis, title)
    names, labels = axes[1].get_legend_handles_labels()
    figure.legend(
        handles=names,
        labels=labels,
        loc="outside right center",
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return Picture(
        name="curve",
        title="Work done over time",
        caption="Of each arm the run with the median completion. Dots: the tail begins, 90 % of "
        "all tokens are sampled.",
        figure=figure,
    )


def _timelines(compared: Comparison) -> Picture:
    arms = compared.arms
    chosen = [_typical(compared.figures(arm))["timeline"] for arm in arms]
    num = sum(len(one["ranks"]) for one in chosen)
    figure = _canvas(11, 0.9 + 0.3 * num + 0.16 * len(arms))
    heights: list[float] = []
    for one in chosen:
        heights += [1.0] * len(one["ranks"]) + [0.35]
    axes: Any = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(one["seconds"] for one in chosen)
    lane = iter(axes)
    shown: dict[str, str] = {}
    for arm, one in zip(arms, chosen, strict=True):
        for index, (rank, shares) in enumerate(one["ranks"].items()):
            axis = next(lane)
            shown |= _draw_rank(axis, shares, one["seconds"])
            axis.set_xlim(0, longest)
            label = f"{arm.name}   rank {rank}" if index == 0 else f"rank {rank}"
            axis.set_ylabel(label, rotation=0, ha="right", va="center", color=INK, fontsize=9)
            last = arm is arms[-1] and index == len(one["ranks"]) - 1
            axis.tick_params(bottom=last, labelbottom=last, colors=INK)
            if last:
                axis.set_xlabel("seconds since the first step", color=INK)
        next(lane).set_axis_off()
    patches = [Patch(color=colour, label=label) for label, colour in shown.items()]
    patches += [Patch(color=HOST, label="host code"), Patch(color=WAITING, label="waits")]
    figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=6,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return Picture(
        name="timeline",
        title="Prefill and decode on each rank",
        caption="Of each arm the run with the median completion: in every slice of time, how much "
        "of it a rank computed for each path.",
        figure=figure,
    )


def _draw_rank(axis: Any, shares: Mapping[str, Sequence[float]], seconds: float) -> dict[str, str]:
    shown = {}
    num = len(shares["host"])
    edges = np.linspace(0, seconds, num + 1)
    axis.fill_between([0, seconds], 0, 1, color=WAITING, linewidth=0)
    level = np.zeros(num)
    order = [name for name in PATH_COLOURS if name in shares]
    order += [name for name in shares if name not in (*order, "host")]
    for name in (*order, "host"):
        top = np.minimum(level + np.array(shares[name]), 1.0)
        colour = HOST if name == "host" else PATH_COLOURS.get(name, _OTHER_PATH)
        both = [np.append(values, values[-1]) for values in (level, top)]
        axis.fill_between(edges, *both, step="post", color=colour, linewidth=0)
        if name != "host":
            shown[_WORDS.get(name, f"{name} computes")] = colour
        level = top
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    return shown


def _typical(figures: Sequence[Figures]) -> Figures:
    """The run with the (lower) median completion."""
    return sorted(figures, key=completion_s)[(len(figures) - 1) // 2]


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10.5, color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(INK)
    axis.tick_params(left=False, colors=INK)
