"""The tables of docs/safety/model.md, made from the results on file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model_bounds import BOUNDS, MUTANTS, Bounds, Mutant

BEGIN, END = "<!-- made by make model: begin -->", "<!-- end -->"

Results = Mapping[str, Mapping[str, Any]]


def key_of(asked: Bounds | Mutant) -> str:
    """Where its result is in the file."""
    return f"{'mutant' if isinstance(asked, Mutant) else 'bounds'}: {asked.name}"


def total_states(results: Results) -> int:
    """Distinct states of all bounds; mutants do not count."""
    return sum(entry["states"] for key, entry in results.items() if key.startswith("bounds"))


def tables(results: Results) -> str:
    """Both tables and the sum between them, as Markdown."""
    bounds = [
        "| bounds | what they cover | macros | states | transitions | processor s | found |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    bounds += [
        f"| {b.name} | {b.covers} | {_macros(b.macros)} | {e['states']:,} | {e['transitions']:,} "
        f"| {e['cpu_s']:.0f} | {e['found'] or 'nothing'} |"
        for b in BOUNDS
        if (e := results.get(key_of(b))) is not None
    ]
    mutants = [
        "| rule | taken away | macros | states until then | first promise seen broken |",
        "|---|---|---|---:|---|",
    ]
    mutants += [
        f"| {m.name} | {m.rule} | {_macros(m.macros)} | {e['states']:,} | {e['found'] or 'NONE'} |"
        for m in MUTANTS
        if (e := results.get(key_of(m))) is not None
    ]
    total = f"{total_states(results):,} states in all, over {len(bounds) - 2} bounds."
    killed = sum(key.startswith("mutant") and entry["holds"] for key, entry in results.items())
    return "\n".join([*bounds, "", total, "", *mutants, "", f"{killed} of {len(mutants) - 2}."])


def written(page: str, results: Results) -> str:
    """The page with its tables made anew; ValueError if it has no place for them."""
    head, found, rest = page.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n{tables(results)}\n{END}{tail}"


def write(page: Path, results: Results) -> None:
    """Make the tables of the file anew."""
    page.write_text(written(page.read_text(), results))


def _macros(macros: Mapping[str, int]) -> str:
    return " ".join(f"`{name}={value}`" for name, value in macros.items())
