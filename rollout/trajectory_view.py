"""Trajectories for a terminal: a table of all, or the text of one, coloured by source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.table import Table
from rich.text import Text

from .token_text import TokenText, visible
from .trajectory import Source, Trajectory

STYLES = {
    Source.PROMPT: "cyan",
    Source.TEMPLATE: "grey58",
    Source.OBSERVATION: "magenta",
    Source.SAMPLED: "bold green",
}
HEAT = ((0.9, "on #1b7837"), (0.5, "on #5a7d2a"), (0.1, "on #94761e"), (0.01, "on #b1511d"))
"""Background of a token by its probability: at least this much; below them all, `COLDEST`."""
COLDEST = "on #a5182b"


def trajectories_table(trajectories: Sequence[Trajectory]) -> Table:
    """One line a trajectory, in the order of their ids."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "task", "environment"):
        table.add_column(name, no_wrap=True, justify="right" if name == "id" else "left")
    for name in ("turns", "tokens", "sampled", "return"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("ended", no_wrap=True)
    for one in sorted(trajectories, key=lambda trajectory: trajectory.trajectory_id):
        table.add_row(
            str(one.trajectory_id),
            Text(visible(one.task_id)),
            Text(visible(one.env)),
            str(one.num_turns),
            str(one.num_tokens),
            str(one.sampled_tokens),
            f"{one.return_:.3f}",
            one.end_reason.value,
        )
    return table


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tokens of one source and turn."""

    source: Source
    turn: int
    start: int
    stop: int


class TrajectoryView:
    """One trajectory as rich texts, to be printed one after the other."""

    def __init__(self, trajectory: Trajectory, words: TokenText, *, heat: bool = False) -> None:
        """With `heat` each sampled token shows its probability under what it was drawn from."""
        self._trajectory = trajectory
        self._pieces = words.pieces(trajectory.token_ids.tolist())
        self._heat = heat

    def coloured(self) -> Iterator[Text]:
        """For a terminal: the text as it was, sources told apart by colour."""
        yield from self._header()
        yield _legend(self._heat)
        yield Text()
        body = Text()
        for run in self._runs():
            for at in range(run.start, run.stop):
                body.append(self._pieces[at], self._style(run.source, at))
            if run.source is Source.SAMPLED:
                body.append(f"\n⟵ {self._turn_line(run.turn)}", "italic yellow")
                if not next(filter(None, self._pieces[run.stop :]), "").startswith("\n"):
                    body.append("\n")
        yield body
        yield from self._footer()

    def plain(self) -> Iterator[Text]:
        """For a pipe or a file: every line starts with its source."""
        yield from self._header()
        for run in self._runs():
            name = f"{run.source.name.lower():<11} | "
            text = "".join(self._plain_piece(run.source, at) for at in range(run.start, run.stop))
            for line in text.splitlines() or [""]:
                yield Text(name + line)
            if run.source is Source.SAMPLED:
                yield Text(f"{'turn':<11} | {self._turn_line(run.turn)}")
        yield from self._footer()

    def _runs(self) -> Iterator[_Run]:
        one = self._trajectory
        keys = zip(one.source.tolist(), one.turn.tolist(), strict=True)
        start = 0
        for (source, turn), group in groupby(keys):
            stop = start + len(list(group))
            yield _Run(Source(source), turn, start, stop)
            start = stop

    def _header(self) -> Iterator[Text]:
        one = self._trajectory
        yield Text(f"trajectory {one.trajectory_id}, task {visible(one.task_id)}", "bold")
        yield Text(
            f"{visible(one.env)}: {one.end_reason.value} after {one.num_turns} turns, return "
            f"{one.return_:.3f}, {one.num_tokens} tokens, {one.sampled_tokens} of them sampled"
        )

    def _footer(self) -> Iterator[Text]:
        error = self._trajectory.info.get("error")
        if error is not None:
            yield Text(f"error: {visible(str(error))}", "red")

    def _turn_line(self, number: int) -> str:
        turn = self._trajectory.turns[number]
        logprobs = self._trajectory.logprob[turn.start : turn.stop]
        mean = f"{np.mean(logprobs, dtype=np.float64):.3f}" if len(logprobs) else "-"
        facts = [
            f"turn {number}: reward {turn.reward:.3f}",
            f"log-probability {mean} (mean of {turn.stop - turn.start} tokens)",
            f"ended by {turn.finish}",
        ]
        if turn.valid_action is not None:
            facts.append("valid" if turn.valid_action else "not valid")
        return ", ".join(facts)

    def _style(self, source: Source, at: int) -> str:
        if not self._heat or source is not Source.SAMPLED:
            return STYLES[source]
        probability = math.exp(self._trajectory.logprob[at])
        shade = next((style for least, style in HEAT if probability >= least), COLDEST)
        return f"bold white {shade}"

    def _plain_piece(self, source: Source, at: int) -> str:
        if not self._heat or source is not Source.SAMPLED:
            return self._pieces[at]
        return f"{self._pieces[at]}[{self._trajectory.logprob[at]:.2f}]"


def _legend(heat: bool) -> Text:
    legend = Text("colours: ")
    for source in (Source.PROMPT, Source.TEMPLATE, Source.OBSERVATION, Source.SAMPLED):
        if not heat or source is not Source.SAMPLED:
            legend.append(source.name.lower(), STYLES[source])
            legend.append(" ")
    if heat:
        legend.append("sampled with probability ")
        for least, style in HEAT:
            legend.append(f" ≥ {least:g} ", f"bold white {style}")
        legend.append(f" < {HEAT[-1][0]:g} ", f"bold white {COLDEST}")
    return legend
