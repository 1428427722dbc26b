"""What became of the injections: who named them, and what went otherwise than it should."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from .run import Run

_NAMED = "named at the post"


def outcome(run: Run) -> str:
    """In a few words, the worst first."""
    errors = [end.error for end in run.ends if end.error]
    where = next((end.injected for end in run.ends if end.injected), None)
    if where is None:
        return "no place found"
    if not errors:
        return "unseen"
    for sign, words in _SIGNS.items():
        if any(error.startswith(sign) for error in errors):
            return words
    return "another error"


_SIGNS = {
    "WrongDataError": "wrong tokens",
    "OrderError": _NAMED,
    "DivergedError": "divergence detected",
    "CollectiveTimeoutError": "hang",
}


def faults(run: Run) -> list[str]:
    """Why a swap that should be named at the post is not; empty if it is.

    On every rank: the rank that made it and both tickets, in words; where data and tickets were
    mixed up, one ticket: which the other was nobody knows.
    """
    where = next((end.injected for end in run.ends if end.injected), None)
    if where is None:
        return []
    rank, found = run.ends[0].injection["rank"], []
    own = run.ends[rank]
    tickets = [where["first"], where["second"]]
    named = all if run.ends[0].injection["kind"] == "order" else any
    if not own.error.startswith("OrderError"):
        found.append(f"rank {rank} itself: {own.error or 'no error'}")
    for end in run.ends:
        called = f"rank {rank} is DIVERGED: OrderError"
        if called not in end.verdict or not named(ticket in end.verdict for ticket in tickets):
            found.append(f"rank {end.rank} does not name {tickets}: {end.verdict}")
        if not where["step"] <= end.step <= where["step"] + 1:
            found.append(f"rank {end.rank} had completed {end.step} steps of {where['step']}")
    if own.step != where["step"]:
        found.append(f"rank {rank} went on to step {own.step} from step {where['step']}")
    return [f"epoch {own.epoch} {run.arm.name}: {text}" for text in found]


_EXPECTED = {
    "order, window": _NAMED,
    "order, gloo": _NAMED,
    "order, window and serial device": _NAMED,
    "mixed up, window": _NAMED,
    "mixed up, gloo": _NAMED,
    "no witness, window": "unseen",
    "no witness, gloo": "unseen",
    "no witness, serial device": "hang",
    "in the sequencer, gloo": "divergence detected",
    "in the sequencer, serial device": "hang",
    "in the sequencer, hashes per communicator, gloo": "unseen",
    "in the sequencer, hashes per communicator, window": "divergence detected",
}
"""Mixed up and without a witness it depends on what met what."""


def wrongs(runs: Sequence[Run]) -> list[str]:
    """Everything that went otherwise than it should, in words."""
    found = []
    for run in runs:
        expected = _EXPECTED.get(run.arm.name)
        what = outcome(run)
        if expected is not None and what != expected:
            errors = [end.error for end in run.ends]
            found.append(f"epoch {run.ends[0].epoch} {run.arm.name}: {what}: {errors}")
        elif expected == _NAMED:
            found += faults(run)
        elif run.arm.name == "in the sequencer, serial device":
            called = f"rank {run.ends[0].injection['rank']} is DIVERGED"
            found += [
                f"rank {end.rank} does not say that {called}: {end.verdict}"
                for end in run.ends
                if called not in end.verdict
            ]
    return found


def table(runs: Sequence[Run]) -> str:
    """One line for each arm, and the places of those that were injected."""
    lines = []
    for name in dict.fromkeys(run.arm.name for run in runs):
        mine = [run for run in runs if run.arm.name == name]
        ends = Counter(outcome(run) for run in mine)
        ms = statistics.median(run.ends[0].seconds for run in mine) * 1000
        words = ", ".join(f"{what} {count}" for what, count in ends.most_common())
        lines.append(f"{name:50} {len(mine):5}  {words}  ({ms:.0f} ms each)")
    places: Counter[str] = Counter()
    for run in runs:
        where = next((end.injected for end in run.ends if end.injected), None)
        if where is not None and outcome(run) == _NAMED:
            kind = run.ends[0].injection["kind"]
            group = "across groups" if len(set(where["roles"])) > 1 else f"both {where['roles'][0]}"
            places[f"{kind}, {where['paths'][0]} first, {group}"] += 1
            places[f"{kind}, equal shapes"] += where["equal"]
            stages = {where[ticket].split()[-1] for ticket in ("first", "second")}
            places[f"{kind}, equal shapes and stages"] += where["equal"] and len(stages) == 1
    lines += [f"  {place:50} {count:5}" for place, count in sorted(places.items())]
    return "\n".join(lines)
