"""The command `interlace`."""

from __future__ import annotations

import os
import traceback as tracebacks
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from interlace.envs.registry import ENVIRONMENTS
from interlace.moe.errors import ModelError
from interlace.rollout import cache
from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.config_file import load_config, preset_names
from interlace.rollout.display import RolloutProgress, config_table
from interlace.rollout.output_folder import OutputFolder
from interlace.rollout.rollout import Rollout
from interlace.rollout.store import TrajectoryWriter
from interlace.rollout.summary import summarise, summary_table, write_summary
from interlace.rollout.tasks import PROMPT_ENV, Task
from interlace.rollout.timeline import draw_timeline
from interlace.rollout.trace import write_trace
from interlace.rollout.trajectory import EndReason, Trajectory

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


class NoEpisodeError(Exception):
    """Every episode ended in an error of its environment; the results are written."""


app = typer.Typer(
    name="interlace",
    help="Rollouts of Mixture-of-Experts language models for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show the Python traceback of an error.")
]


@app.command()
def model(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(cache.MODEL_NAMES)}.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default one in the cache.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of what is random in it.")] = None,
    slices: Annotated[
        int | None, typer.Option(min=1, help="smollm2-moe: experts cut from each MLP.")
    ] = None,
    copies: Annotated[
        int | None, typer.Option(min=1, help="smollm2-moe: copies of each of them.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(min=0.0, help="smollm2-moe: relative noise on the copies.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Build a model from what is installed; nothing is downloaded."""
    with _one_line_errors(traceback):
        given = {"slices": slices, "copies": copies, "noise": noise, "seed": seed}
        options = {key: value for key, value in given.items() if value is not None}
        folder = _model_destination(name, out, options)
        if not cache.is_model(folder):
            _build_model(name, folder, options)
        used_as = name if out is None else folder
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{name} is in {folder}")
        console.print(
            f"Use it: interlace rollout --preset demo --set model.path={used_as} --out out/demo"
        )


def _model_destination(name: str, out: Path | None, options: Mapping[str, object]) -> Path:
    if name not in cache.MODEL_NAMES:
        known = ", ".join(cache.MODEL_NAMES)
        raise ConfigError(f"there is no model {name!r}: choose one of {known}")
    for key in options:
        if key != "seed" and name != cache.SMOLLM2:
            raise ConfigError(f"--{key} belongs to {cache.SMOLLM2}, not to {name}: leave it out")
        if out is None:
            raise ConfigError(f"--{key} changes the model: give it a folder of its own with --out")
    folder = out or cache.cache_folder() / "models" / name
    if folder.exists() and (out is not None or not cache.is_model(folder)):
        raise ConfigError(f"{folder} exists already: remove it, or choose another with --out")
    return folder


def _build_model(name: str, folder: Path, options: Mapping[str, object]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        row = progress.add_task(f"building {name}", total=None)

        def show(done: int, total: int) -> None:
            progress.update(row, completed=done, total=total)

        cache.build_model(name, folder, on_progress=show, **options)


@app.command()
def rollout(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    job: Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"Instead of a file: {', '.join(preset_names())}.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value, as in a.b=c."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Run every task of a job and write what came of it.

    Under torchrun the same command runs on every rank, and rank 0 writes.
    """
    with _one_line_errors(traceback):
        if job is None and preset is None:
            raise ConfigError("nothing to run: give a job file, or --preset demo")
        config = load_config(job=job, preset=preset, overrides=overrides or ())
        tasks = _tasks(config)
        console = Console(highlight=False, soft_wrap=True, quiet=not _is_driver(config))
        folder = OutputFolder(out)
        if _is_driver(config):
            folder.prepare()
            folder.config.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        console.print(config_table(config))
        _run(config, tasks, folder, console)


def _tasks(config: RolloutConfig) -> list[Task]:
    try:
        tasks = config.expand_tasks()
    except ValueError as error:
        raise ConfigError(f"tasks: {error}") from error
    for env in dict.fromkeys(task.env for task in tasks):
        if ":" not in env and env != PROMPT_ENV and env not in ENVIRONMENTS:
            known = ", ".join(sorted(ENVIRONMENTS))
            raise ConfigError(
                f"tasks: there is no environment {env!r}: choose one of {known}, or give the "
                "import path of a class, as in my_package.my_module:MyEnvironment"
            )
    return tasks


def _run(config: RolloutConfig, tasks: list[Task], folder: OutputFolder, console: Console) -> None:
    """Collect and write trajectories as they finish, then everything about the whole run."""
    console.print(f"starting {config.layout.world} ranks ({config.launch.kind})")
    trajectories: list[Trajectory] = []
    with ExitStack() as stack:
        try:
            rollout = stack.enter_context(Rollout(config))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not rollout.is_driver:
            for _ in rollout.run(tasks):
                pass
            return
        writer = TrajectoryWriter(folder.trajectories)
        with writer, RolloutProgress(tasks, console) as progress:
            for trajectory in rollout.run(tasks):
                writer.append(trajectory)
                trajectories.append(trajectory)
                progress.add(trajectory)
    summary = summarise(
        trajectories,
        rollout.records,
        mode=config.mode,
        layout={name: getattr(config.layout, name) for name in ("world", "dp", "tp", "ep")},
        wall_s=rollout.wall_s,
        cpu_s=rollout.cpu_s,
        exact=rollout.exact,
    )
    write_trace(folder.trace, rollout.records)
    draw_timeline(folder.timeline, rollout.records, mode=config.mode)
    write_summary(folder.summary, summary)
    console.print(summary_table(summary))
    console.print(f"results are in {folder.path}")
    _tell_environment_errors(trajectories, console)


def _tell_environment_errors(trajectories: Sequence[Trajectory], console: Console) -> None:
    """Name the first; if nothing but errors came, the rollout has failed."""
    wrong = [t for t in trajectories if t.end_reason is EndReason.ENVIRONMENT_ERROR]
    if not wrong:
        return
    first = min(wrong, key=lambda trajectory: trajectory.trajectory_id)
    line = (
        f"{len(wrong)} of {len(trajectories)} episodes ended in an environment error, the first "
        f"of them {first.task_id}: {first.info.get('error', 'unknown')}"
    )
    if len(wrong) == len(trajectories):
        raise NoEpisodeError(line)
    console.print(line, style="yellow", markup=False)


def _is_driver(config: RolloutConfig) -> bool:
    return config.launch.kind != "torchrun" or os.environ.get("RANK", "0") == "0"


@contextmanager
def _one_line_errors(traceback: bool) -> Iterator[None]:
    """An error becomes one line and an exit code."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if traceback:
            tracebacks.print_exception(error)
        code, line = _told(error)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"error: {' '.join(line.split())}", style="red", markup=False)
        raise typer.Exit(code) from None


def _told(error: BaseException) -> tuple[int, str]:
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case ConfigError() | ModelError():
            return BAD_INPUT, str(error)
        case NoEpisodeError():
            return FAILED, str(error)
    return FAILED, f"{type(error).__name__}: {error}"


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
