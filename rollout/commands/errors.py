"""An error of a command: one line that says what to do next, and an exit code."""

from __future__ import annotations

import errno
import os
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from interlace.moe.errors import ModelError
from interlace.rollout.config import ConfigError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
_NO_SPACE = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""Libraries that write files have errors of their own, which quote the system's."""

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
    line = f"{type(error).__name__}: {error}"
    if any(sign in line for sign in _NO_SPACE):
        line += (
            ": free some space, or choose another disk: --out for results, INTERLACE_CACHE for "
            "models, TMPDIR for Ray; what was finished is in trajectories.parquet.partial"
        )
    return FAILED, line
