"""What a rollout shows in a terminal while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as Row
from rich.table import Table
from rich.text import Text

from interlace.rollout.config import RolloutConfig
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import Trajectory


def config_table(config: RolloutConfig) -> Table:
    """The whole tree, one line a section and one a run of tasks; what was set stands out."""
    table = Table.grid(padding=(0, 2))
    top: dict[str, Any] = {}
    lines: list[tuple[str, Text]] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            lines.append((name, _fields(value)))
        elif name == "tasks":
            lines += [(f"tasks.{i}", _set_fields(section)) for i, section in enumerate(value)]
        else:
            top[name] = value
    table.add_row("rollout", _join(top, config.model_fields_set))
    for row in lines:
        table.add_row(*row)
    return table


def _fields(section: BaseModel) -> Text:
    values = {name: getattr(section, name) for name in type(section).model_fields}
    return _join(values, section.model_fields_set)


def _set_fields(section: BaseModel) -> Text:
    values = {name: getattr(section, name) for name in type(section).model_fields}
    given = {name: value for name, value in values.items() if name in section.model_fields_set}
    return _join(given, section.model_fields_set)


def _join(values: dict[str, Any], given: set[str]) -> Text:
    parts = []
    for name, value in values.items():
        shown = list(value) if isinstance(value, tuple) else value
        parts.append(Text(f"{name}={shown}", style="bold" if name in given else "dim"))
    return Text(" ").join(parts)


class RolloutProgress:
    """Counts finished trajectories and sampled tokens, and what runs in each environment.

    A context manager; on a terminal it draws, elsewhere it prints its last state once.
    """

    def __init__(
        self, tasks: Sequence[Task], console: Console, running: Mapping[str, int] | None = None
    ) -> None:
        """`running` is looked at whenever the display is drawn."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _NoteColumn({} if running is None else running),
            TimeElapsedColumn(),
            console=console,
        )
        totals = Counter(task.env for task in tasks)
        self._rows = {
            env: self._progress.add_task(f"  {env}", total=total, note="", env=env)
            for env, total in totals.items()
        }
        self._all = self._progress.add_task("trajectories", total=len(tasks), note="", env="")
        self._started = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def add(self, trajectory: Trajectory) -> None:
        """One more is finished."""
        self._tokens += trajectory.sampled_tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        note = f"{self._tokens} tokens sampled, {self._tokens / seconds:.1f}/s"
        self._progress.update(self._all, advance=1, note=note)
        self._progress.update(self._rows[trajectory.env], advance=1)


class _NoteColumn(ProgressColumn):
    """How many episodes of a row's environment are under way; on the row of all, its note."""

    max_refresh = 0.2

    def __init__(self, running: Mapping[str, int]) -> None:
        super().__init__()
        self._running = running

    def render(self, task: Row) -> Text:
        num = self._running.get(task.fields["env"], 0)
        return Text(f"{num} under way" if num else task.fields["note"])
