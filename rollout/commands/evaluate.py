"""`interlace eval`: how often a model solves the tasks of a job."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.config_file import preset_names
from interlace.rollout.evaluation import evaluate
from interlace.rollout.evaluation_figure import draw_evaluation
from interlace.rollout.metrics_file import MetricsFile
from interlace.rollout.output_folder import OutputFolder, prepare_folder
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import Trajectory

from .collect import collect, environment_errors
from .errors import Traceback, one_line_errors
from .job import introduce, is_driver, read_job, tasks_of


@dataclass(frozen=True, slots=True)
class EvaluationFolder:
    """Names of what an evaluation writes; `greedy` and `sampled` are folders `show` reads."""

    path: Path

    @property
    def figures(self) -> Path:
        return self.path / "eval.json"

    @property
    def picture(self) -> Path:
        return self.path / "eval.png"

    @property
    def greedy(self) -> OutputFolder:
        return OutputFolder(self.path / "greedy")

    @property
    def sampled(self) -> OutputFolder:
        return OutputFolder(self.path / "sampled")

    def prepare(self) -> None:
        """Make it, free of an earlier evaluation's files. ConfigError if it holds others."""
        parts = (self.greedy, self.sampled)
        for part in parts:
            if part.path.is_dir():
                part.prepare()
        prepare_folder(self.path, (self.figures, self.picture), [part.path for part in parts])
        for part in parts:
            part.prepare()


def evaluation(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    job: Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"Instead of a file: {', '.join(preset_names())}.")
    ] = None,
    samples: Annotated[
        int, typer.Option("-k", "--samples", min=1, help="Sampled trajectories of each task.")
    ] = 4,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value, as in a.b=c."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Play each task of a job once greedily and K times sampled; tell how often it is solved.

    A task is solved if its environment says so (info["success"]), else if its return is positive.
    """
    with one_line_errors(traceback):
        config = read_job(job, preset, overrides)
        tasks = _each_once(tasks_of(config))
        if config.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature is 0, so that all samples of a task would be equal: "
                "--set sampling.temperature=1 (the greedy part needs nothing)"
            )
        folder = EvaluationFolder(out)
        if is_driver(config):
            folder.prepare()
        _evaluate(config, tasks, samples, folder, introduce(config))


def _evaluate(
    config: RolloutConfig,
    tasks: list[Task],
    samples: int,
    folder: EvaluationFolder,
    console: Console,
) -> None:
    console.print(f"greedy: {len(tasks)} tasks once")
    sampling = config.sampling.model_copy(update={"temperature": 0.0})
    greedy = _play(config.model_copy(update={"sampling": sampling}), tasks, folder.greedy, console)
    console.print(f"sampled: {len(tasks)} tasks {samples} times")
    repeated = [replace(task, group_id=task.task_id) for task in tasks for _ in range(samples)]
    sampled = _play(config, repeated, folder.sampled, console)
    if not is_driver(config):
        return
    rows = evaluate(greedy, sampled, seed=config.seed)
    figures = {
        "model": config.model.path,
        "seed": config.seed,
        "temperature": config.sampling.temperature,
        "environments": rows,
    }
    text = json.dumps(figures, indent=2, allow_nan=False, ensure_ascii=False)
    folder.figures.write_text(text + "\n", encoding="utf-8")
    draw_evaluation(folder.picture, rows, title=f"{config.model.path}, {len(tasks)} tasks")
    console.print(evaluation_table(rows))
    console.print(f"results are in {folder.path}", markup=False)
    if wrong := environment_errors([*greedy, *sampled]):
        console.print(f"{wrong}; they count as not solved", style="yellow", markup=False)


def _play(
    config: RolloutConfig, tasks: list[Task], folder: OutputFolder, console: Console
) -> list[Trajectory]:
    if is_driver(config):
        folder.config.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return collect(config, tasks, folder, console, [MetricsFile(folder.metrics)])[1]


def _each_once(tasks: list[Task]) -> list[Task]:
    """The job's tasks without the repetitions of groups, in its order."""
    return list({task.task_id: replace(task, group_id=None) for task in tasks}.values())


def evaluation_table(rows: dict[str, dict[str, Any]]) -> Table:
    """One line an environment: rates in percent, with their 95 % intervals."""
    table = Table(title="tasks solved, with 95 % intervals", title_justify="left")
    table.add_column("environment", no_wrap=True)
    table.add_column("tasks", justify="right")
    table.add_column("greedy", justify="right")
    ks = sorted({int(k) for row in rows.values() for k in row["pass_at_k"]})
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    for env, row in rows.items():
        rates = [row["greedy"], *(row["pass_at_k"][str(k)] for k in ks)]
        table.add_row(env, str(row["tasks"]), *map(_percent, rates))
    return table


def _percent(estimate: dict[str, Any]) -> str:
    if estimate["low"] is None:
        return f"{estimate['rate']:.0%}"
    return f"{estimate['rate']:.0%}\n{estimate['low']:.0%} to {estimate['high']:.0%}"
