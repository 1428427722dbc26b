"""Other engines, each in a process and an environment of its own, led through the phases."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .played import PlayedPhase
from .process_tree import tree_cpu_s
from .scripts import Said, Script
from .serving import JOB, SAID
from .workload import Phase, max_context

LOG = "engine.txt"
_END_S = 10.0
_REASON_ELSEWHERE = "root cause above"
"""vLLM's last error says that it is not the reason."""

Tell = Callable[[str], None]


class PeerError(RuntimeError):
    """An engine ended, or did not answer in time; says what it printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start one engine process."""

    command: tuple[str, ...]
    """The folder of its job and our process id are appended."""
    environ: Mapping[str, str]
    """Added to ours."""


def play_peer(
    launches: Sequence[Launch],
    phases: Sequence[Phase],
    job: Mapping[str, Any],
    folder: Path,
    tell: Tell,
    *,
    patience_s: float = 1800.0,
) -> list[PlayedPhase]:
    """All phases, in as many processes as there are launches; scripts are dealt out by turns.

    `job`: for the engine: its checkpoint and settings. A phase lasts from the word that it begins
    to the last process's word that it is done; CPU is that of this process and all below it.
    PeerError if an engine fails, or says nothing for `patience_s`.
    """
    timed: list[tuple[float, float, float]] = []
    num = len(launches)
    with ExitStack() as last_first:
        processes = []
        for index, launch in enumerate(launches):
            dealt = [phase.scripts[index::num] for phase in phases]
            own = folder / f"engine-{index}"
            _write_job(own, job, dealt, max_context(phases))
            processes.append(last_first.enter_context(PeerProcess(launch, own, patience_s)))
        for phase in phases:
            tell(f"starting {phase.name}")
            for process in processes:
                process.expect("ready")
            tell(phase.name)
            cpu_s, began_at = tree_cpu_s(os.getpid()), time.monotonic()
            for process in processes:
                process.go()
            for process in processes:
                process.expect("done")
            ended_at = time.monotonic()
            timed.append((began_at, ended_at, tree_cpu_s(os.getpid()) - cpu_s))
        for process in processes:
            process.expect("end")
    said = [_read(folder / f"engine-{index}" / SAID) for index in range(num)]
    return [
        PlayedPhase(
            name=phase.name,
            began_at=began_at,
            ended_at=ended_at,
            cpu_s=cpu_s,
            said=[said[index % num][place][index // num] for index in range(len(phase.scripts))],
        )
        for place, (phase, (began_at, ended_at, cpu_s)) in enumerate(
            zip(phases, timed, strict=True)
        )
    ]


class PeerProcess:
    """A process that speaks as `serving` does, from ``with`` to its end, its children included."""

    def __init__(self, launch: Launch, folder: Path, patience_s: float) -> None:
        self._launch, self._folder, self._patience_s = launch, folder, patience_s
        self._heard = b""

    def __enter__(self) -> Self:
        command = [*self._launch.command, str(self._folder), str(os.getpid())]
        with (self._folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._launch.environ},
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            _ends_within(self._process, _END_S)
        for by in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(self._process.pid, by):
                break
            _ends_within(self._process, _END_S if by is signal.SIGTERM else 0.0)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def go(self) -> None:
        """The word that it waits for."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the engine ended: {self._last_line()}") from None

    def expect(self, word: str) -> None:
        """Wait for this line. PeerError for another, for the end, and after the patience."""
        give_up_at = time.monotonic() + self._patience_s
        while b"\n" not in self._heard:
            heard = self._hear(give_up_at - time.monotonic())
            if heard is None:
                raise PeerError(
                    f"the engine said nothing for {self._patience_s:.0f} s, expected {word!r}; its "
                    f"last line: {self._last_line()}"
                )
            if not heard:
                self._process.wait()
                raise PeerError(
                    f"the engine ended with code {self._process.returncode}: {self._last_line()}"
                )
            self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        if line.decode() != word:
            raise PeerError(f"the engine said {line.decode()!r}, expected {word!r}")

    def _hear(self, seconds: float) -> bytes | None:
        """What comes next, empty at the end; None if nothing does in time."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            return os.read(out, 4096) if selector.select(max(0.0, seconds)) else None

    def _last_line(self) -> str:
        text = (self._folder / LOG).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        told = [line for line in lines if "Error: " in line and _REASON_ELSEWHERE not in line]
        return (told or lines or ["it printed nothing"])[-1][:300]


def _write_job(
    folder: Path, job: Mapping[str, Any], phases: Sequence[Sequence[Script]], context: int
) -> None:
    folder.mkdir(parents=True)
    written = {
        **job,
        "max_context": context,
        "num_scripts": max(len(scripts) for scripts in phases),
        "phases": [[script.as_json() for script in scripts] for scripts in phases],
    }
    (folder / JOB).write_text(json.dumps(written) + "\n", encoding="utf-8")


def _read(path: Path) -> list[list[list[Said]]]:
    phases = json.loads(path.read_text(encoding="utf-8"))
    return [[[Said(**turn) for turn in script] for script in phase] for phase in phases]


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(group: int, by: signal.Signals) -> bool:
    """Whether there was anybody left."""
    try:
        os.killpg(group, by)
    except ProcessLookupError:
        return False
    return True
