"""How busy others keep this machine.

The kernel's one-minute load average counts every task that runs or could run, ours too. So our own
are counted the same way, every second, over this process and all its descendants (ranks,
environments, Ray), averaged with the kernel's one-minute decay, and subtracted. Above `LIMIT` the
cores a run needs were taken from it too often for its time to mean anything.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Protocol, Self

LIMIT = 3.0
_PERIOD_S = 1.0
_MINUTE_S = 60.0


class Load(Protocol):
    """What runs ask about the machine."""

    @property
    def others(self) -> float:
        """The load of other processes now."""
        ...

    def begin(self) -> None:
        """A run begins."""
        ...

    def peak(self) -> float:
        """The highest load of others since it began."""
        ...


class LoadWatch:
    """Watches from ``with`` to its end, in a thread."""

    def __init__(self) -> None:
        self._own, self._others = 0.0, max(0.0, os.getloadavg()[0])
        self._peak = self._others
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def others(self) -> float:
        return self._others

    def begin(self) -> None:
        self._peak = self._others

    def peak(self) -> float:
        return self._peak

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_PERIOD_S):
            now = time.monotonic()
            self._own = decayed(self._own, num_runnable(os.getpid()), now - last)
            last = now
            self._others = max(0.0, os.getloadavg()[0] - self._own)
            self._peak = max(self._peak, self._others)


def decayed(average: float, count: int, seconds: float) -> float:
    """A one-minute load average after `seconds` with `count` tasks."""
    keep = math.exp(-seconds / _MINUTE_S)
    return average * keep + count * (1 - keep)


def num_runnable(root: int, proc: Path = Path("/proc")) -> int:
    """Threads of process `root` and its descendants that run, could run, or wait for a disk.

    Without the one that looks.
    """
    looking = str(threading.get_native_id())
    children: dict[int, list[int]] = defaultdict(list)
    for folder in proc.iterdir():
        if folder.name.isdigit() and (fields := _stat(folder)) is not None:
            children[int(fields[1])].append(int(folder.name))
    pending, num = [root], 0
    while pending:
        process = pending.pop()
        pending += children[process]
        tasks = proc / str(process) / "task"
        try:
            threads = list(tasks.iterdir())
        except OSError:  # it ended meanwhile
            continue
        others = [thread for thread in threads if thread.name != looking]
        states = [fields[0] for thread in others if (fields := _stat(thread)) is not None]
        num += sum(state in ("R", "D") for state in states)
    return num


def _stat(folder: Path) -> list[str] | None:
    """State, parent and what follows; None if it ended meanwhile."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
