"""The command `interlace`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from interlace.rollout import cache
from interlace.rollout.callbacks import Callback
from interlace.rollout.commands import bench
from interlace.rollout.commands.ablate import ablate
from interlace.rollout.commands.collect import collect, environment_errors
from interlace.rollout.commands.doctor import doctor
from interlace.rollout.commands.errors import NoEpisodeError, Traceback, one_line_errors
from interlace.rollout.commands.evaluate import evaluation
from interlace.rollout.commands.init import init
from interlace.rollout.commands.job import (
    introduce,
    is_driver,
    on_one_host,
    read_job,
    tasks_of,
)
from interlace.rollout.commands.show import show
from interlace.rollout.commands.unsafe import UnsafeWatch
from interlace.rollout.commands.verify import verify
from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.config_file import preset_names
from interlace.rollout.launch.across_hosts import run_across_hosts
from interlace.rollout.metrics_file import MetricsFile
from interlace.rollout.output_folder import OutputFolder
from interlace.rollout.summary import summarise, summary_table, write_summary
from interlace.rollout.tasks import Task
from interlace.rollout.tensorboard import TensorBoard
from interlace.rollout.timeline import draw_timeline
from interlace.rollout.trace import write_trace
from interlace.rollout.trajectory import EndReason

app = typer.Typer(
    name="interlace",
    help="Rollouts of Mixture-of-Experts language models for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(init)
app.command()(show)
app.command("eval")(evaluation)
app.command()(doctor)
app.command()(verify)
app.command()(ablate)
app.add_typer(bench.app, name="bench")


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
    with one_line_errors(traceback):
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
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write curves to OUT/tensorboard.")
    ] = False,
    hosts: Annotated[
        int,
        typer.Option(
            min=1,
            max=2,
            help="2: half of the ranks on each of two hosts, which are made of Linux namespaces "
            "for this run; needs root.",
        ),
    ] = 1,
    traceback: Traceback = False,
) -> None:
    """Run every task of a job and write what came of it.

    Under torchrun the same command runs on every rank, and rank 0 writes.
    """
    with one_line_errors(traceback):
        config = read_job(job, preset, overrides)
        tasks = tasks_of(config)
        folder = OutputFolder(out)
        if hosts > 1:
            raise typer.Exit(run_across_hosts(config, on_one_host(sys.argv[1:]), folder.prepare))
        callbacks: list[Callback] = [MetricsFile(folder.metrics)]
        if tensorboard:
            callbacks.append(TensorBoard(folder.tensorboard))
        if is_driver(config):
            folder.prepare()
            folder.config.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _run(config, tasks, folder, introduce(config), callbacks)


def _run(
    config: RolloutConfig,
    tasks: list[Task],
    folder: OutputFolder,
    console: Console,
    callbacks: Sequence[Callback],
) -> None:
    """Collect and write trajectories as they finish, then everything about the whole run."""
    watch = UnsafeWatch(config, tasks, console)
    try:
        rollout, trajectories = collect(config, tasks, folder, console, [*callbacks, watch])
    except BaseException as error:
        watch.tell(error)
        raise
    if not rollout.is_driver:
        return
    summary = summarise(
        trajectories,
        rollout.records,
        mode=config.mode,
        layout={name: getattr(config.layout, name) for name in ("world", "dp", "tp", "ep")},
        wall_s=rollout.wall_s,
        cpu_s=rollout.cpu_s,
        exact=rollout.exact,
        transport=rollout.transport,
        unsafe=watch.tell(),
    )
    write_trace(folder.trace, rollout.records)
    draw_timeline(folder.timeline, rollout.records, mode=config.mode)
    write_summary(folder.summary, summary)
    console.print(summary_table(summary))
    console.print(f"results are in {folder.path}")
    if wrong := environment_errors(trajectories):
        if summary["end_reasons"][EndReason.ENVIRONMENT_ERROR.value] == len(trajectories):
            raise NoEpisodeError(wrong)
        console.print(wrong, style="yellow", markup=False)


def main() -> None:
    """Entry point of the command. Modules of the current folder can be named in a job."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    app()


if __name__ == "__main__":
    main()
