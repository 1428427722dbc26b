"""`interlace show`: what is in a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from interlace.rollout.cache import MODEL_NAMES, cache_folder, is_model
from interlace.rollout.config import ConfigError
from interlace.rollout.output_folder import OutputFolder
from interlace.rollout.store import read_trajectories
from interlace.rollout.token_text import TokenText
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.trajectory_view import TrajectoryView, trajectories_table

from .errors import Traceback, one_line_errors


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --out folder of a rollout.")],
    number: Annotated[
        int | None, typer.Argument(metavar="[ID]", help="One trajectory.", show_default=False)
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show how likely each sampled token was.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer to use, if not that of the job.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show the trajectories of a rollout, or the text of one of them."""
    with one_line_errors(traceback):
        trajectories = read_folder(folder)
        console = Console(highlight=False, soft_wrap=True)
        if number is None:
            if not console.is_terminal:
                console.width = 1000
            console.print(trajectories_table(trajectories))
            return
        trajectory = _find(trajectories, number)
        words = TokenText(_tokenizer_folder(folder, model))
        view = TrajectoryView(trajectory, words, heat=tokens)
        for text in view.coloured() if console.is_terminal else view.plain():
            console.print(text)


def read_folder(path: Path) -> list[Trajectory]:
    """The trajectories of a results folder, of an unfinished rollout those written so far.

    ConfigError that says which folder to give instead, if there are none.
    """
    folder = OutputFolder(path)
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}: give the --out folder of a rollout")
    partial = folder.trajectories.with_name(folder.trajectories.name + ".partial")
    file = folder.trajectories if folder.trajectories.is_file() else partial
    if not file.is_file():
        inside = sorted(one.parent for one in path.glob(f"*/{folder.trajectories.name}"))
        found = " or ".join(map(str, inside[:3])) or "the --out folder of a rollout"
        raise ConfigError(f"{path} holds no {folder.trajectories.name}: give {found}")
    try:
        return read_trajectories(file)
    except ValueError as error:
        again = "" if file != partial else ": the rollout that writes it has not ended"
        raise ConfigError(f"{error}{again}") from error


def _find(trajectories: list[Trajectory], number: int) -> Trajectory:
    found = next((one for one in trajectories if one.trajectory_id == number), None)
    if found is None:
        ids = sorted(one.trajectory_id for one in trajectories)
        known = f"ids are {ids[0]} to {ids[-1]}" if ids else "there are none yet"
        raise ConfigError(f"there is no trajectory {number} here: {known}")
    return found


def _tokenizer_folder(results: Path, model: str | None) -> Path:
    if model is None:
        try:
            config = json.loads(OutputFolder(results).config.read_bytes())
            model = str(config["model"]["path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{results} has no config.json that names the model: give it as --model"
            ) from error
    folder = Path(model).expanduser()
    if model in MODEL_NAMES:
        folder = cache_folder() / "models" / model
        if not is_model(folder):
            raise ConfigError(f"{model} is not in the cache: build it with interlace model {model}")
    if not folder.is_dir():
        raise ConfigError(
            f"the job's model folder {model} is not there: give it as --model (a relative path "
            "counts from the folder the rollout was started in)"
        )
    return folder
