"""An error of a command: one line that says what to do next, and an exit code."""

from __future__ import annotations

import errno
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from interlace.moe.errors import ModelError
from interlace.rollout.config import ConfigError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show the Python traceback of an error.")
]


class NoEpisodeError(Exception):
    """Every episode ended in an error of its environment; the results are written."""


@contextmanager
def one_line_errors(traceback: bool) -> Iterator[None]:
    """An error of the block becomes one line on stderr, and ends the command with its code."""
    try:
        yield
    except typer.Exit:
        raise
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
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for {error.filename}" if error.filename else ""
            return FAILED, (
                f"no space left on the disk{where}: free some and run again, or choose another "
                "disk with --out (results), INTERLACE_CACHE (models) or TMPDIR (Ray); what was "
                "finished before is in trajectories.parquet.partial"
            )
    return FAILED, f"{type(error).__name__}: {error}"
