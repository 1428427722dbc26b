"""Runs that are kept: each in a process and a folder of its own, made once, by turns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from interlace.rollout.config import ConfigError

from .arms import Arm
from .child import LOG, REQUEST, RESULT
from .machine_load import LIMIT, Load

CHILD = (sys.executable, "-m", "interlace.rollout.ablation.child")
_LOOK_S = 0.5
_PATIENCE_S = 3.0
_NUM_TRIES = 2
"""Of a run that came out void, before the next one's turn."""

Told = Callable[[str], None]


class Request(Protocol):
    """What all runs of a folder have in common."""

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one arm, as its folder tells."""

    arm: Arm
    repeat: int
    figures: dict[str, Any] | None
    """None if it failed."""
    load: float
    """The highest load of other processes during it."""
    void: bool
    error: str | None = None

    @property
    def counts(self) -> bool:
        return self.figures is not None and not self.void


def by_turns(arms: Sequence[Arm], repeats: int) -> Iterator[tuple[int, Arm]]:
    """A B C A B C: neighbours see the same machine."""
    for repeat in range(repeats):
        for arm in arms:
            yield repeat, arm


class Bench:
    """A folder of runs. A run that is there and counts is not made again."""

    def __init__(
        self,
        folder: Path,
        request: Request,
        *,
        watch: Load,
        max_load: float = LIMIT,
        patience_s: float = 0.0,
        tell: Told,
        program: Sequence[str] = CHILD,
        progress: Callable[[Path], str] | None = None,
    ) -> None:
        """`patience_s`: how long a run waits for others to let go of the machine. `program` is
        given the run's folder and the process to die with; `progress` tells from that folder how
        far it is."""
        self._folder, self._request, self._tell = folder, request, tell
        self._watch, self._max_load, self._patience_s = watch, max_load, patience_s
        self._program, self._progress = program, progress or _num_finished

    def prepare(self) -> None:
        """Make the folder. ConfigError if it holds runs of another request, or other files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "request.json"
        mine = self._request.as_json()
        if path.is_file():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            differ = [key for key in mine if theirs.get(key) != mine[key]]
            if differ:
                raise ConfigError(
                    f"--out {self._folder}: holds runs with another {differ[0]} "
                    f"({theirs.get(differ[0])!r}, now {mine[differ[0]]!r}): choose another folder"
                )
        elif any(self._folder.iterdir()):
            raise ConfigError(
                f"--out {self._folder}: holds files, and not those of a comparison: choose an "
                "empty or new folder"
            )
        path.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")

    def run(self, arm: Arm, repeat: int, *, where: str = "runs", pictures: bool = False) -> Run:
        """The run, made now unless it is there and counts. One that others disturbed is made once
        more before it is called void."""
        folder = self._folder / where / f"{arm.in_file_names}-{repeat}"
        found = self._read(folder, arm, repeat)
        if found is not None and found.counts:
            return found
        for _ in range(_NUM_TRIES):
            self._wait_for_quiet()
            found = self._make(folder, arm, repeat, pictures)
            if not found.void:
                break
        assert found is not None
        return found

    def _make(self, folder: Path, arm: Arm, repeat: int, pictures: bool) -> Run:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        wanted = {
            "request": self._request.as_json(),
            "arm": arm.name,
            "overrides": list(arm.overrides),
            "pictures": pictures,
        }
        (folder / REQUEST).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        command = [*self._program, str(folder), str(os.getpid())]
        self._watch.begin()
        with (folder / LOG).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                while not _ends_within(process, _LOOK_S):
                    self._tell(f"{arm.name}, run {repeat + 1}: {self._progress(folder)}")
            except BaseException:
                _end(process)
                raise
        load = self._watch.peak()
        outcome: dict[str, Any] = {"load": round(load, 2), "void": load > self._max_load}
        if process.returncode or not (folder / RESULT).is_file():
            outcome["error"] = _last_line(folder / LOG, process.returncode)
        (folder / "outcome.json").write_text(json.dumps(outcome) + "\n", encoding="utf-8")
        made = self._read(folder, arm, repeat)
        assert made is not None
        return made

    def _read(self, folder: Path, arm: Arm, repeat: int) -> Run | None:
        try:
            outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        failed = "error" in outcome
        figures = None
        if not failed:
            figures = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return Run(
            arm=arm,
            repeat=repeat,
            figures=figures,
            load=outcome["load"],
            void=outcome["void"] and not failed,
            error=outcome.get("error"),
        )

    def _wait_for_quiet(self) -> None:
        give_up_at = time.monotonic() + self._patience_s
        while self._watch.others > self._max_load and time.monotonic() < give_up_at:
            self._tell(
                f"waiting for a quieter machine: the load of others is {self._watch.others:.1f}"
            )
            time.sleep(_LOOK_S)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order, if it can: a terminal has interrupted it already, others have not."""
    if not _ends_within(process, _PATIENCE_S):
        process.send_signal(signal.SIGINT)
    if not _ends_within(process, 10 * _PATIENCE_S):
        process.kill()
        process.wait()


def _num_finished(folder: Path) -> str:
    """How far a run is, from the file it writes as it goes."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "starting"
    num = sum(line.startswith('{"kind": "trajectory"') for line in lines)
    return f"{num} trajectories finished"


def _last_line(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with exit code {code}"
