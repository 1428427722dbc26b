"""Forks the ranks of one case after another, until its input ends.

It has imported torch and joined nothing, and has one thread: so a fork costs milliseconds and is
safe, and a rank that is killed by its transport leaves the next case alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LONGEST = 2000
"""Characters of a rank's standard error that are kept: the last ones."""


def main() -> None:
    """One case per line of standard input, one line of ends to standard output."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run_case(order)), file=answers, flush=True)


def run_case(order: dict[str, Any]) -> list[dict[str, Any]]:
    """How each rank ended; those that are still there at the deadline are killed."""
    program = getattr(importlib.import_module(order["module"]), order["program"])
    folder, num_ranks = Path(order["folder"]), order["ranks"]
    began = time.monotonic()
    running = {_fork(program, rank, num_ranks, folder): rank for rank in range(num_ranks)}
    ended: dict[int, tuple[int, float]] = {}
    while running:
        late = time.monotonic() - began > order["deadline_s"]
        for pid in list(running):
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ended[running.pop(pid)] = code, time.monotonic() - began
        time.sleep(0.002)
    return [
        {
            "status": ended[rank][0],
            "said": _text(folder / f"{rank}.said"),
            "stderr": _text(folder / f"{rank}.stderr")[-_LONGEST:],
            "seconds": ended[rank][1],
        }
        for rank in range(num_ranks)
    ]


def _fork(program: Callable[[int, int, str], str], rank: int, num_ranks: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        errors = os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        shared = folder / "shared"
        with contextlib.suppress(FileExistsError):
            shared.mkdir()
        said = program(rank, num_ranks, str(shared))
        (folder / f"{rank}.said").write_text(said)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        # Threads of a transport may still wait for a rank that is gone: nobody waits for them.
        os._exit(status)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


if __name__ == "__main__":
    main()
