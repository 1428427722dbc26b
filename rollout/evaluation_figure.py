"""eval.png: greedy success and pass@k of each environment, as bars with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREEDY = "#30363d", "#e8743b"
SAMPLED = ("#c9dcf0", "#9dc0e3", "#6f9fd2", "#4a80bf", "#2f62a3", "#1d4680")
_WIDTH = 0.8


def draw_evaluation(path: Path, rows: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    """Draw what `evaluate` returned to a PNG file."""
    ks = sorted({int(k) for row in rows.values() for k in row["pass_at_k"]})
    bars = 1 + len(ks)
    picture = Figure(figsize=(max(6.0, 1.5 + 0.42 * bars * len(rows)), 4.5), layout="constrained")
    FigureCanvasAgg(picture)
    axes: Any = picture.add_subplot()
    each = _WIDTH / bars
    shades = _shades(len(ks))
    for place, row in enumerate(rows.values()):
        left = place - _WIDTH / 2
        _bar(axes, left + each / 2, each, row["greedy"], GREEDY, "greedy" if not place else None)
        for index, k in enumerate(ks):
            label = f"pass@{k}" if not place else None
            estimate = row["pass_at_k"].get(str(k))
            if estimate is not None:
                _bar(axes, left + (index + 1.5) * each, each, estimate, shades[index], label)
    axes.set_xticks(range(len(rows)), [f"{name}\n{_tasks(row)}" for name, row in rows.items()])
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_ylabel("tasks solved", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.grid(axis="y", color="#e6e8ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    picture.legend(
        loc="outside lower center", ncols=bars, frameon=False, title="lines: 95 % intervals"
    )
    picture.savefig(path, dpi=130)


def _bar(
    axes: Any, at: float, width: float, estimate: Mapping[str, Any], colour: str, label: str | None
) -> None:
    rate, low, high = estimate["rate"], estimate["low"], estimate["high"]
    axes.bar(at, rate, width * 0.92, color=colour, label=label)
    if low is not None and high is not None:
        below, above = max(0.0, rate - low), max(0.0, high - rate)
        axes.errorbar(at, rate, [[below], [above]], color=INK, capsize=3, linewidth=1.2)
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.text(at, 0.02, f"{rate:.0%}", ha="center", va="bottom", fontsize=8, color=INK, bbox=plate)


def _shades(num: int) -> list[str]:
    """So many, from the palest to the darkest."""
    last = len(SAMPLED) - 1
    return [SAMPLED[last if num == 1 else round(i * last / (num - 1))] for i in range(num)]


def _tasks(row: Mapping[str, Any]) -> str:
    return f"{row['tasks']} task" + ("s" if row["tasks"] > 1 else "")
