"""`interlace init`: a first job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from interlace.rollout.config import ConfigError
from interlace.rollout.job_template import job_template

from .errors import Traceback, one_line_errors


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.toml"),
    traceback: Traceback = False,
) -> None:
    """Write a job file with every key as a comment. It runs as it is."""
    with one_line_errors(traceback):
        write_job(path)
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{path} is written", markup=False)
        console.print(f"Run it: interlace rollout {path} --out out/first", markup=False)


def write_job(path: Path) -> None:
    """Write the template; ConfigError if there is something already, or it cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(job_template())
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already: remove it, or give another name, as in interlace init "
            "other.toml"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}: choose another folder"
        ) from error
