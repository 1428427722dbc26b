"""Does multiplexing pay, where, and where not? Every mode and every order, on fixed work.

    python experiments/ablate.py --out out/ablate [--only swe-long-link] [--repeat 7]

Ten parts, each an `interlace ablate` in a folder of its own with a report.html. Under a minute a
run on two quiet cores, about three hours in all (see `PARTS`: arms times five or seven, and a few
runs that tune chunked). Runs that are there are not made again: stop it when you like and call it
again, and those that others disturbed are made again. At the end the bars are printed: what
multiplexing has to reach, and what it reached.

Expected: one digest everywhere. Without a link multiplexed is as fast as the best mode of its
sharding, since nothing travels that could be hidden. With a link it wins at least half of the time
that serial waits. On math-tail there is nothing to prefill, so nothing to win.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from interlace.rollout.ablation.machine_load import LIMIT
from interlace.rollout.ablation.request import Request, link_overrides
from interlace.rollout.ablation.statistics import ratio_words
from interlace.rollout.commands.ablate import ablation, show
from interlace.rollout.config import ConfigError

ORDERS = "plan,plan-layer,plan-2layers,turnstile,turnstile-layer,global_enqueue"
LINK = "500us,2gbit"

Report = Mapping[str, Any]
Figure = Callable[[Report], tuple[bool | None, str]]
"""Whether a bar is reached, None if that cannot be told, and what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    wanted: str
    figure: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    workload: str
    arms: str | None = None
    link: str | None = None
    sleep: bool = True
    repeat: int = 5
    overrides: Sequence[str] = ()
    bars: Sequence[Bar] = ()


def arm_ratio(report: Report, over: str, under: str) -> Mapping[str, Any] | None:
    """The ratio of completions of two arms, where it is in the report."""
    if over == report["subject"]:
        found: Mapping[str, Any] | None = report["arms"].get(under, {}).get("subject_ratio")
        return found
    if under == report["reference"]:
        ratios = report["arms"].get(over, {}).get("ratio_to_reference") or {}
        other: Mapping[str, Any] | None = ratios.get("completion")
        return other
    return None


def no_worse_than_the_best(report: Report) -> tuple[bool | None, str]:
    best = report["against_best_of_same_sharding"]
    if best is None or best["ratio"] is None:
        return None, "no pair counts"
    return best["ratio"]["high"] <= 1.05, f"{ratio_words(best['ratio'])} of {best['arm']}'s"


def at_most(over: str, under: str, limit: float, end: str = "median") -> Figure:
    def figure(report: Report) -> tuple[bool | None, str]:
        ratio = arm_ratio(report, over, under)
        return (
            (None, "no pair counts")
            if ratio is None
            else (
                ratio[end] <= limit,
                f"{ratio_words(ratio)} of {under}'s",
            )
        )

    return figure


def idle_won(report: Report) -> tuple[bool | None, str]:
    gain = report["arms"].get("multiplexed", {}).get("gain")
    if gain is None or gain["won_of_idle"] is None:
        return None, "no pair counts"
    words = f"{max(0.0, gain['won_of_idle']):.0%} of {gain['serial_idle']:.0%} (goal 80 %)"
    return gain["won_of_idle"] >= 0.5, words


def nothing_won(report: Report) -> tuple[bool | None, str]:
    ratio = arm_ratio(report, "multiplexed", "serial")
    if ratio is None:
        return None, "no pair counts"
    said = report["verdict"].startswith("no gain")
    return ratio["low"] <= 1 <= ratio["high"] and said, ratio_words(ratio)


def waits_less(report: Report) -> tuple[bool | None, str]:
    arms = report["arms"]
    waits = {
        name: arms[name]["decode_wait_s"]["p50"]
        for name in ("plan", "turnstile", "global_enqueue")
        if name in arms and arms[name]["completion_s"]
    }
    told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in waits.items())
    if not {"plan", "global_enqueue"} <= waits.keys():
        return None, told or "no run counts"
    return waits["plan"] < waits["global_enqueue"], told


def turnstile_is_no_sooner(report: Report) -> tuple[bool | None, str]:
    ratio = arm_ratio(report, "turnstile", "plan")
    if ratio is None:
        return None, "no pair counts"
    exchanges = ", ".join(
        f"{name} {report['arms'][name]['exchanges']:,.0f}" for name in ("plan", "turnstile")
    )
    return ratio["high"] >= 1, f"{ratio_words(ratio)} of plan's; exchanges: {exchanges}"


BEST = Bar(
    wanted="multiplexed to the best other of its sharding: upper end at most 1.05",
    figure=no_worse_than_the_best,
)
LINKED = (
    Bar(wanted="at least half of serial's idle share is won", figure=idle_won),
    Bar(wanted="at most 0.92 of serial's time", figure=at_most("multiplexed", "serial", 0.92)),
    Bar(
        wanted="less than whole_forward's time, surely",
        figure=at_most("multiplexed", "whole_forward", 0.999, "high"),
    ),
)
ORDERED = (
    Bar(wanted="turnstile takes no less than plan", figure=turnstile_is_no_sooner),
    Bar(wanted="decode waits less than under global_enqueue, p50", figure=waits_less),
)


IN_PLACE = "serial,chunked,whole_forward,multiplexed"
DATA_PARALLEL = ("layout.tp=1", "dispatch.prefill=all_to_all", "dispatch.decode=all_to_all")
"""As one runs ranks of one host: each has its own rows, and passes go straight."""

PARTS = (
    Part(
        name="game-short",
        workload="game-short",
        arms=f"{IN_PLACE},replicas",
        overrides=DATA_PARALLEL,
        bars=(BEST,),
    ),
    Part(name="swe-long", workload="swe-long", overrides=DATA_PARALLEL, bars=(BEST,)),
    Part(name="game-short-heads-split", workload="game-short", arms=IN_PLACE, bars=(BEST,)),
    Part(
        name="swe-long-link",
        workload="swe-long",
        arms=IN_PLACE,
        link=LINK,
        repeat=7,
        bars=LINKED,
    ),
    Part(
        name="swe-long-shared-link",
        workload="swe-long",
        arms="serial,multiplexed",
        link=f"{LINK},shared",
    ),
    Part(
        name="swe-long-data-parallel",
        workload="swe-long",
        arms="serial,multiplexed",
        link=LINK,
        overrides=("layout.tp=1",),
    ),
    Part(
        name="math-tail",
        workload="math-tail",
        arms="serial,multiplexed",
        bars=(Bar(wanted="no gain: the interval contains 1", figure=nothing_won),),
    ),
    Part(
        name="splits",
        workload="swe-long",
        arms="serial,multiplexed,disaggregated-1p3d,disaggregated-2p2d,disaggregated-3p1d",
        link=LINK,
        repeat=3,
        overrides=("layout.world=4", "layout.tp=1"),
    ),
    Part(name="orders", workload="swe-long", arms=ORDERS, link=LINK, bars=ORDERED),
    Part(
        name="orders-no-waits",
        workload="swe-long",
        arms=ORDERS,
        link=LINK,
        sleep=False,
        bars=ORDERED,
    ),
)


def main(
    out: Annotated[Path, typer.Option(help="Folder for everything.")],
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Some parts: {', '.join(part.name for part in PARTS)}."),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Runs of each arm, instead of the part's own number.")
    ] = None,
    scale: Annotated[str, typer.Option(help="Of the workloads.")] = "minute",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change one value of every job.")
    ] = None,
    max_load: Annotated[float, typer.Option(help="Void where others' load was higher.")] = LIMIT,
    patience: Annotated[float, typer.Option(help="Seconds a run waits for quiet.")] = 600.0,
) -> None:
    """Make the runs that are missing, show every part, then the bars."""
    console = Console(highlight=False, soft_wrap=True)
    wanted = [part for part in PARTS if not only or part.name in only]
    reports: dict[str, Report] = {}
    for part in wanted:
        console.rule(part.name)
        try:
            reports[part.name] = found = ablation(
                Request(
                    workload=part.workload,
                    scale=scale,
                    sleep=part.sleep,
                    overrides=(
                        *(link_overrides(part.link) if part.link else ()),
                        *part.overrides,
                        *(overrides or ()),
                    ),
                ),
                out / part.name,
                arms=part.arms,
                repeat=repeat or part.repeat,
                max_load=max_load,
                patience_s=patience,
                console=console,
            )
        except ConfigError as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(2) from error
        show(found, console)
    met = _show_bars(wanted, reports, console)
    summary = {name: report["verdict"] for name, report in reports.items()}
    (out / "verdicts.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if not met:
        raise typer.Exit(1)


def _show_bars(parts: Sequence[Part], reports: Mapping[str, Report], console: Console) -> bool:
    table = Table(title="bars", title_justify="left")
    for heading in ("part", "wanted", "measured", ""):
        table.add_column(heading, overflow="fold")
    met = all(report["sound"] for report in reports.values())
    for part in parts:
        for bar in part.bars:
            reached, words = bar.figure(reports[part.name])
            met = met and bool(reached)
            told = {True: "reached", False: "[red]MISSED[/red]", None: "[yellow]open[/yellow]"}
            table.add_row(part.name, bar.wanted, words, told[reached])
    console.print(table, soft_wrap=False)
    return met


if __name__ == "__main__":
    typer.run(main)
