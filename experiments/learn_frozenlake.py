"""Does a model learn from rollouts whose weights move, and do the numbers stay right meanwhile?

    python experiments/learn_frozenlake.py --out out/learn      (make learn)

GRPO on the frozen lake: a tiny Mixtral from scratch (226,112 parameters, 4 experts, 2 chosen), 128
episodes an iteration on two ranks, one action a turn, reward only on the goal. The trainer is
transformers with one thread in this process; it hands over its weights after every iteration.

Arm barrier: nothing is played while the trainer works. Three seeds multiplexed, the first of them
again in mode serial. Arm in-flight: the next iteration is played meanwhile, and goes on over its
old keys and values when the weights change (`keep`). Then the same again, with weights that change
where it was recorded that they had.

Expected: success from a few in a hundred to nine in ten within a few minutes of two cores, every
time; at a barrier the trainer finds the log-probabilities of the rollout to 1e-5 at every step, and
the curves of serial and multiplexed are the same bits; so are those of in-flight and its replay.
A run that is complete is not made again: stop it when you like and call it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import transformers
import typer
from rich.console import Console
from rich.table import Table

from interlace.experiments.grpo.picture import draw_curves
from interlace.experiments.grpo.record import Iteration, Outcome, Plan
from interlace.experiments.grpo.run import learn

GOAL, START = 0.9, 0.1
GAP_BAR = 1e-5
SECONDS_BAR = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run: what it computes, in which mode, and whose updates it repeats."""

    plan: Plan
    mode: str = "multiplexed"
    replays: str | None = None
    """Name of the run at whose positions its weights change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that has to hold, and what was found."""

    wanted: str
    found: str
    holds: bool


def arms(iterations: int, episodes: int) -> dict[str, Arm]:
    """All runs by name, in the order in which they are made."""
    plans = [Plan(seed=seed, iterations=iterations, episodes=episodes) for seed in range(3)]
    flight = Plan(seed=0, in_flight=True, iterations=iterations, episodes=episodes)
    return {
        **{f"barrier, seed {plan.seed}": Arm(plan=plan) for plan in plans},
        "barrier, seed 0, serial": Arm(plan=plans[0], mode="serial"),
        "in flight, seed 0": Arm(plan=flight),
        "in flight, seed 0, replayed": Arm(plan=flight, replays="in flight, seed 0"),
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the report and the picture.")],
    iterations: Annotated[int, typer.Option(min=1, help="Of every run.")] = 40,
    episodes: Annotated[int, typer.Option(min=2, help="Of every iteration.")] = 128,
    kind: Annotated[
        Literal["ray", "local"], typer.Option(help="launch.kind: processes, or all in this one.")
    ] = "ray",
) -> None:
    """Make the runs that are missing, then report. Ends with 1 if a bar does not hold."""
    console = Console(highlight=False)
    transformers.utils.logging.disable_progress_bar()
    runs: dict[str, Outcome] = {}
    asked = arms(iterations, episodes)
    for place, (name, arm) in enumerate(asked.items(), start=1):
        console.print(f"run {place} of {len(asked)}: {name}")
        runs[name] = outcome(out / name.replace(", ", "-").replace(" ", "-"), arm, runs, kind)
    bars = judge(runs)
    title = "Frozen lake, GRPO, a tiny Mixtral on two ranks"
    draw_curves(out / "curve.png", runs, goal=GOAL, gap_bar=GAP_BAR, title=title)
    (out / "report.json").write_text(json.dumps(report(runs, bars), indent=2) + "\n")
    console.print(runs_table(runs), lags_table(runs), bars_table(bars))
    console.print(f"report in {out / 'report.json'}, picture in {out / 'curve.png'}")
    if not all(bar.holds for bar in bars):
        sys.exit(1)


def outcome(folder: Path, arm: Arm, runs: Mapping[str, Outcome], kind: str) -> Outcome:
    """From `folder`, if the same run is there complete; else made now and written there."""
    path = folder / "outcome.json"
    if path.is_file():
        found = Outcome.read(path)
        if (found.plan, found.mode, found.kind) == (arm.plan, arm.mode, kind):
            return found
    found = learn(
        arm.plan,
        folder,
        mode=arm.mode,
        kind=kind,
        positions=runs[arm.replays].positions if arm.replays else None,
        on_iteration=lambda iteration: show(iteration, arm.plan.iterations),
    )
    found.write(path)
    return found


def show(iteration: Iteration, total: int) -> None:
    """One line of progress, whatever it is written to."""
    seconds = iteration.seconds
    print(
        f"  {iteration.number + 1:3}/{total}  success {iteration.success:.3f}  turns "
        f"{iteration.mean_turns:4.1f}  entropy {iteration.entropy:.2f}  gap "
        f"{iteration.largest_gap:.1e}  seconds: rollout {seconds['rollout']:.2f} train "
        f"{seconds['train']:.2f} update {seconds['update']:.3f} (stall {seconds['stall']:.4f})",
        flush=True,
    )


def judge(runs: Mapping[str, Outcome]) -> list[Bar]:
    """Every bar of the question, beside what the runs came to."""
    bars = []
    for name, run in runs.items():
        first, last = run.iterations[0].success, run.final_success
        bars.append(
            Bar(
                wanted=f"{name}: from below {START:.0%} to {GOAL:.0%} within {SECONDS_BAR:.0f} s",
                found=f"{first:.1%} to {last:.1%} in {run.wall_s:.0f} s",
                holds=first < START and last >= GOAL and run.wall_s <= SECONDS_BAR,
            )
        )
        if not run.plan.in_flight:
            bars.append(
                Bar(
                    wanted=f"{name}: gap at most {GAP_BAR:g} at every step",
                    found=f"largest of {len(run.iterations)} steps {run.largest_gap:.1e}",
                    holds=run.largest_gap <= GAP_BAR,
                )
            )
    flight = runs["in flight, seed 0"]
    mixed = sum(len(one.tokens_of_version) > 1 for one in flight.iterations)
    bars.append(
        Bar(
            wanted="in flight, seed 0: weights change while episodes are played",
            found=f"in {mixed} of {len(flight.iterations)} iterations",
            holds=mixed >= (len(flight.iterations) - 1) / 2,
        )
    )
    for one, other in (
        ("barrier, seed 0", "barrier, seed 0, serial"),
        ("in flight, seed 0", "in flight, seed 0, replayed"),
    ):
        equal = runs[one].equals(runs[other])
        bars.append(
            Bar(
                wanted=f"{one} = {other}, every number of the curve",
                found="the same bits" if equal else first_difference(runs[one], runs[other]),
                holds=equal,
            )
        )
    return bars


def first_difference(one: Outcome, other: Outcome) -> str:
    """Where two curves part."""
    for mine, theirs in zip(one.iterations, other.iterations, strict=False):
        if mine.numbers != theirs.numbers:
            return f"they differ from iteration {mine.number + 1} on"
    return f"{len(one.iterations)} and {len(other.iterations)} iterations"


def report(runs: Mapping[str, Outcome], bars: Sequence[Bar]) -> dict[str, object]:
    """What report.json holds; the curves are in each run's outcome.json."""
    return {
        "holds": all(bar.holds for bar in bars),
        "bars": [{"wanted": bar.wanted, "found": bar.found, "holds": bar.holds} for bar in bars],
        "runs": {
            name: {
                "mode": run.mode,
                "success": [iteration.success for iteration in run.iterations],
                "final_success": run.final_success,
                "largest_gap": run.largest_gap,
                "wall_s": run.wall_s,
                "weights": run.iterations[-1].weights,
            }
            for name, run in runs.items()
        },
    }


def runs_table(runs: Mapping[str, Outcome]) -> Table:
    table = Table(title="runs")
    for column in ("run", "first", "last 5", "90 % at", "wall s", "largest gap", "weights"):
        table.add_column(column, justify="left" if column in ("run", "weights") else "right")
    for name, run in runs.items():
        reached = next((one.number + 1 for one in run.iterations if one.success >= GOAL), None)
        table.add_row(
            name,
            f"{run.iterations[0].success:.3f}",
            f"{run.final_success:.3f}",
            "never" if reached is None else f"it {reached}",
            f"{run.wall_s:.0f}",
            f"{run.largest_gap:.1e}",
            run.iterations[-1].weights[:12],
        )
    return table


def lags_table(runs: Mapping[str, Outcome]) -> Table:
    table = Table(title="|log-probability, rollout - trainer| in flight, by KV-version lag")
    for column in ("run", "lag", "tokens", "mean", "largest 1 % from", "largest"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run in runs.items():
        if not run.plan.in_flight:
            continue
        for lag in sorted({lag for one in run.iterations for lag in one.gap}):
            gaps = [one.gap[lag] for one in run.iterations if lag in one.gap]
            tokens = sum(gap.tokens for gap in gaps)
            table.add_row(
                name,
                str(lag),
                f"{tokens:,}",
                f"{sum(gap.mean * gap.tokens for gap in gaps) / tokens:.1e}",
                f"{max(gap.p99 for gap in gaps):.1e}",
                f"{max(gap.largest for gap in gaps):.1e}",
            )
    return table


def bars_table(bars: Sequence[Bar]) -> Table:
    table = Table(title="bars")
    for column in ("wanted", "found", ""):
        table.add_column(column)
    for bar in bars:
        table.add_row(bar.wanted, bar.found, "holds" if bar.holds else "DOES NOT HOLD")
    return table


if __name__ == "__main__":
    typer.run(main)
