"""Forks four ranks that take all injections, and gathers what each saw."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .rank import ARMS, WORLD, Arm, Ended, join, run_once

_SECONDS_EACH, _SECONDS_TO_START = 10.0, 60.0
"""Far more than an injection takes, its hang included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One injection, as seen by all ranks in their order."""

    arm: Arm
    ends: tuple[Ended, ...]


def run(counts: Mapping[str, int], *, seed: int) -> list[Run]:
    """`counts`: how many injections of each of ARMS. RuntimeError if a rank does not see all."""
    order = [name for name, count in counts.items() for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="interlace-swaps-") as folder:
        pids = [_fork(rank, folder, order, seed) for rank in range(WORLD)]
        _wait(pids, _SECONDS_TO_START + _SECONDS_EACH * len(order))
        seen = [_read(Path(folder), rank) for rank in range(WORLD)]
        words = [_stderr(Path(folder), rank) for rank in range(WORLD)]
    if any(len(ends) < len(order) for ends in seen):
        few = [len(ends) for ends in seen]
        raise RuntimeError(f"ranks saw {few} of {len(order)} injections\n" + "\n".join(words))
    return [
        Run(arm=ARMS[name], ends=tuple(ends[at] for ends in seen)) for at, name in enumerate(order)
    ]


def _fork(rank: int, folder: str, order: Sequence[str], seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        errors = os.open(f"{folder}/{rank}.stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        with open(f"{folder}/{rank}.ends", "w") as file:
            store = join(rank, folder)
            for epoch, name in enumerate(order):
                ended = run_once(rank, store, ARMS[name], seed, epoch)
                print(json.dumps(dataclasses.asdict(ended)), file=file, flush=True)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        # Threads of abandoned groups may wait for one another: nobody waits for them.
        os._exit(0)


def _wait(pids: Sequence[int], seconds: float) -> None:
    deadline, left = time.monotonic() + seconds, list(pids)
    while left:
        for pid in list(left):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.remove(pid)
                # Without it the others would wait for their own deadlines.
                deadline = min(deadline, time.monotonic() + _SECONDS_EACH)
        time.sleep(0.01)


def _read(folder: Path, rank: int) -> list[Ended]:
    file = folder / f"{rank}.ends"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Ended(**json.loads(line)) for line in lines]


def _stderr(folder: Path, rank: int) -> str:
    file = folder / f"{rank}.stderr"
    return f"rank {rank}: {file.read_text(errors='replace')[-2000:] if file.exists() else ''}"
