"""Runs the model checker Spin on the protocol: bounds that must hold, mutants that must not.

`check` does as much as fits into some seconds. As a program this runs everything, one search after
the other, and writes each result down at once, so that it can be ended and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .model_bounds import BOUNDS, MUTANTS, SEARCHES, Bounds, Mutant
from .model_page import key_of, write

PROTOCOL = Path(__file__).with_name("protocol.pml")
INSTALL = "the model needs spin and a C compiler; on Debian: apt-get install spin gcc"

_DEPTH = 2_000_000
_MEMORY_MB = 8000
_PROMISE = re.compile(r"assertion violated \W*(\w+)")
_STATES = re.compile(r"(\d+) states, stored")
_TRANSITIONS = re.compile(r"(\d+) transitions")
_ERRORS = re.compile(r"errors: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one search came to."""

    name: str
    mutant: bool
    states: int
    transitions: int
    cpu_s: float
    found: str
    """The promise that was broken, `livelock`, or nothing."""
    complete: bool
    """Every state was visited, or something was found."""
    expected: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """As it must be: nothing is found in bounds, and a mutant's promise is broken."""
        if self.mutant:
            return self.found in self.expected
        return self.complete and not self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What was searched within the time, or why nothing was."""

    outcomes: tuple[Outcome, ...] = ()
    unavailable: str = ""
    """How to get what is missing; empty if nothing is."""

    @property
    def states(self) -> int:
        """Distinct states of the bounds that were searched to the end."""
        return sum(o.states for o in self.outcomes if not o.mutant and o.complete)

    @property
    def num_bounds(self) -> int:
        return sum(not o.mutant for o in self.outcomes)

    @property
    def num_mutants(self) -> int:
        return sum(o.mutant for o in self.outcomes)

    @property
    def num_killed(self) -> int:
        return sum(o.mutant and o.holds for o in self.outcomes)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if not o.holds)

    @property
    def holds(self) -> bool:
        """False also where nothing could be searched."""
        return bool(self.outcomes) and not self.failures


def unavailable() -> str:
    """What to install, or nothing if all is there."""
    return "" if shutil.which("spin") and _compiler() else INSTALL


def check(seconds: float, clock: Callable[[], float] = time.monotonic) -> ModelResult:
    """The quick bounds, then quick mutants until the time is over: at least one of each."""
    missing = unavailable()
    if missing:
        return ModelResult(unavailable=missing)
    end = clock() + seconds
    bounds = [b for b in BOUNDS if b.quick]
    outcomes = [search(b, optimise="-O0") for b in bounds]
    for nth, mutant in enumerate(m for m in MUTANTS if not m.slow):
        if nth and clock() > end:
            break
        outcomes.append(search(mutant, optimise="-O0"))
    return ModelResult(outcomes=tuple(outcomes))


def search(asked: Bounds | Mutant, *, optimise: str = "-O2", limit_s: int = 7200) -> Outcome:
    """Build the checker for these macros and run it to its end or to the first broken promise.

    `limit_s`: most seconds of processor time. RuntimeError if the model does not build.
    """
    flags = [f"-D{name}={value}" for name, value in asked.macros.items()]
    kind = ["-DNP"] if asked.livelock else ["-DSAFETY"]
    if asked.livelock:
        flags.append("-DNP")
    with tempfile.TemporaryDirectory() as folder:
        _build(["spin", *flags, "-a", str(PROTOCOL.resolve())], folder)
        compiler = _compiler() or "cc"
        options = [optimise, "-w", "-DCOLLAPSE", f"-DMEMLIM={_MEMORY_MB}", *kind]
        _build([compiler, *options, "-o", "pan", "pan.c"], folder)
        arguments = ["./pan", "-n", f"-m{_DEPTH if optimise == '-O2' else 20_000}"]
        arguments += ["-w26" if optimise == "-O2" else "-w20"]
        arguments += ["-l", "-f"] if asked.livelock else []
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            ["sh", "-c", f'ulimit -t {limit_s}; exec "$@"', "sh", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = done.stdout
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return _outcome(asked, said, complete=done.returncode == 0, cpu_s=round(cpu_s, 2))


def _outcome(asked: Bounds | Mutant, said: str, *, complete: bool, cpu_s: float) -> Outcome:
    errors = int(_first(_ERRORS, said) or "0")
    found = ""
    if errors:
        found = _first(_PROMISE, said)
        if not found:
            found = "livelock" if "non-progress cycle" in said else "unnamed"
    cut = "search depth too small" in said or "out of memory" in said or "memory limit" in said
    is_mutant = isinstance(asked, Mutant)
    return Outcome(
        name=asked.name,
        mutant=is_mutant,
        states=int(_first(_STATES, said) or "0"),
        transitions=int(_first(_TRANSITIONS, said) or "0"),
        cpu_s=cpu_s,
        found=found,
        complete=bool(errors) or (complete and not cut and "errors: 0" in said),
        expected=asked.promises if isinstance(asked, Mutant) else (),
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match.group(1) if match else ""


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


def _build(command: Sequence[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "Error" in done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


# ---- everything, by hand


def fingerprint(asked: Bounds | Mutant) -> str:
    """Changes with the model (not with its comments), the macros and what is searched for."""
    model = " ".join(re.sub(r"/\*.*?\*/", "", PROTOCOL.read_text(), flags=re.DOTALL).split())
    told = json.dumps([model, dict(asked.macros), asked.livelock])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Results written earlier, by kind and name."""
    if not file.exists():
        return {}
    loaded: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return loaded


def run_all(file: Path, asked: Iterable[Bounds | Mutant], say: Callable[[str], None]) -> bool:
    """Search all that `file` does not hold yet; True if everything is as it must be."""
    results = recorded(file)
    wanted = list(asked)
    good = True
    for nth, item in enumerate(wanted, start=1):
        key, print_of = key_of(item), fingerprint(item)
        where = f"[{nth}/{len(wanted)}] {key}"
        if results.get(key, {}).get("fingerprint") != print_of:
            say(f"{where} ...")
            outcome = search(item)
            results[key] = {
                "fingerprint": print_of,
                "macros": dict(item.macros),
                **asdict(replace(outcome, expected=())),
                "holds": outcome.holds,
            }
            del results[key]["expected"]
            order = {key_of(each): place for place, each in enumerate(SEARCHES)}
            kept = sorted((k for k in results if k in order), key=order.__getitem__)
            file.write_text(json.dumps({k: results[k] for k in kept}, indent=1) + "\n")
        entry = results[key]
        good = good and entry["holds"] is True
        verdict = "as it must be" if entry["holds"] else "NOT AS IT MUST BE"
        say(f"{where}: {entry['states']:,} states, found: {entry['found'] or 'nothing'}; {verdict}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole, or the parts named; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("docs/safety/model_results.json"))
    parser.add_argument("--page", type=Path, help="whose tables are made anew")
    parser.add_argument("names", nargs="*", help="bounds or mutants; all if none is named")
    told = parser.parse_args(arguments)
    if unavailable():
        print(unavailable(), file=sys.stderr)
        return 2
    asked = [a for a in SEARCHES if not told.names or a.name in told.names]
    good = run_all(told.results, asked, lambda line: print(line, flush=True))
    if told.page is not None:
        write(told.page, recorded(told.results))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
