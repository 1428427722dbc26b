"""peers.png: who needs how long, and who is how fast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from interlace.rollout.timeline import INK

from .contestants import INTERLACE, LLAMA_CPP, TRANSFORMERS, VLLM
from .report import which

_COLOURS = {
    INTERLACE: "#2f6db5",
    VLLM: "#e8743b",
    TRANSFORMERS: "#3a9d78",
    LLAMA_CPP: "#8a5aa8",
}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Bars of a report's medians, with a dot for each run. Nothing is drawn without an arm."""
    arms: Mapping[str, Any] = found["arms"]
    if not arms:
        return
    figure = Figure(figsize=(11, 2.4 + 0.75 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(which(found), x=0.01, ha="left", fontsize=11, color=INK)
    axes: Any = figure.subplots(2, 2, sharey=True, height_ratios=(1, 1.4))
    for axis, key, title in zip(
        axes[0], ("completion_s", "cpu_s"), ("completion (s)", "CPU (s)"), strict=True
    ):
        for place, arm in enumerate(arms.values()):
            values = arm[key]
            axis.barh(place, median(values), color=_COLOURS[arm["engine"]], height=0.62)
            axis.scatter(values, [place] * len(values), s=14, color=INK, zorder=3, linewidths=0)
        _finish(axis, title)
    for axis, key, title in zip(
        axes[1],
        ("prefill_tokens_per_s", "decode_tokens_per_s"),
        ("prefill (tokens/s)", "decode (tokens/s)"),
        strict=True,
    ):
        for place, arm in enumerate(arms.values()):
            _rate_bars(axis, place, arm, key)
        _finish(axis, title)
    batches = list(next(iter(arms.values()))["decode_tokens_per_s"])
    figure.legend(
        handles=[
            Patch(color=INK, alpha=shade, label=f"batch {batch}")
            for shade, batch in zip(_shades(len(batches)), batches, strict=True)
        ],
        loc="outside lower center",
        ncols=len(batches),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    for axis in axes[:, 0]:
        axis.set_yticks(np.arange(len(arms)), list(arms))
        axis.set_ylim(len(arms) - 0.4, -0.6)
    figure.savefig(path, dpi=130, facecolor="white")


def _rate_bars(axis: Any, place: int, arm: Mapping[str, Any], key: str) -> None:
    rates = arm[key]
    height = 0.72 / len(rates)
    for number, (shade, rate) in enumerate(zip(_shades(len(rates)), rates.values(), strict=True)):
        at = place + (number - (len(rates) - 1) / 2) * height
        colour = _COLOURS[arm["engine"]]
        axis.barh(at, rate or 0.0, color=colour, alpha=shade, height=0.9 * height)


def _shades(num: int) -> list[float]:
    """The larger the batch, the darker."""
    return np.linspace(0.45, 1.0, num).tolist() if num > 1 else [1.0]


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10.5, color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(INK)
    axis.tick_params(left=False, colors=INK)
    axis.set_xlim(left=0)
