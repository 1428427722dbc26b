"""`interlace doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from interlace.rollout.checkup import Check, Status, machine_checks
from interlace.rollout.checkup_ranks import (
    model_is_exact,
    processes_talk,
    ray_starts,
    tiny_model_is_exact,
    window_works,
)

from .errors import FAILED, Traceback, one_line_errors

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also try the self-test on this model's weights.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Also start and end Ray.")] = False,
    traceback: Traceback = False,
) -> None:
    """Check this machine: Python, cores, memory, disk, torch, Ray, processes, exact kernels.

    The exit code is 1 if a check fails.
    """
    with one_line_errors(traceback):
        console = Console(highlight=False, soft_wrap=True)
        wanted: list[Callable[[], Check]] = [
            *machine_checks(),
            processes_talk,
            window_works,
            tiny_model_is_exact,
        ]
        if model is not None:
            wanted.append(partial(model_is_exact, model))
        if ray:
            wanted.append(ray_starts)
        found = []
        for look in wanted:
            found.append(look())
            console.print(check_line(found[-1]))
        failed = [check.name for check in found if check.status is Status.FAIL]
        if failed:
            console.print(f"not ready: {', '.join(failed)}", style="bold red", markup=False)
            raise typer.Exit(FAILED)
        console.print("ready: interlace rollout --preset tiny --out out/first", markup=False)


def check_line(check: Check) -> Text:
    """A check as one line, or two where something is to be done."""
    line = Text()
    line.append(f"{check.status.value:<4}", _STYLES[check.status])
    line.append(f"  {check.name}: ", "bold")
    line.append(check.found)
    if check.advice:
        line.append(f"\n      → {check.advice}", "yellow")
    return line
