"""CPU time of a process with all that descends from it, and of everybody else (Linux)."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_STEAL = 8
"""Field of the line `cpu` in /proc/stat: time that the host gave to other guests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    parent: int
    own: int
    """Ticks it has computed."""
    ended: int
    """Ticks of children that ended and that it waited for."""


def tree_cpu_s(root: int, proc: Path = Path("/proc")) -> float:
    """CPU seconds of process `root` and its descendants so far, those that have ended included.

    A process that nobody waited for when it ended takes its seconds along: compare two moments
    between which none does.
    """
    processes = _processes(proc)
    own = [processes[pid] for pid in _tree(processes, root)]
    return sum(one.own + one.ended for one in own) / _TICKS_A_SECOND


class OthersWatch:
    """How many cores other processes keep busy, other guests of the host included.

    Watches from ``with`` to its end, in a thread, all but this process and its descendants. It
    misses what lives for less than a second.
    """

    def __init__(
        self, *, window_s: float = 10.0, period_s: float = 1.0, proc: Path = Path("/proc")
    ) -> None:
        """Looks every `period_s`, and tells means over `window_s`."""
        self._window_s, self._period_s, self._proc = window_s, period_s, proc
        self._window: deque[tuple[float, float]] = deque()
        """Moments, and cores over the period before each."""
        self._peak = 0.0
        self._known, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="other processes", daemon=True)

    def __enter__(self) -> Self:
        """Returns after a first window."""
        self._thread.start()
        self._known.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def others(self) -> float:
        """Cores, a mean over the last window."""
        window = list(self._window)
        return sum(cores for _, cores in window) / len(window)

    def begin(self) -> None:
        """A run begins."""
        self._peak = 0.0

    def peak(self) -> float:
        """The most cores over a window since it began."""
        return self._peak

    def _watch(self) -> None:
        # Ours too: one that is orphaned is another's from then on, not from its beginning.
        before, _ = _all_and_others(self._proc)
        steal, last = _steal(self._proc), time.monotonic()
        known_at = last + self._window_s
        while not self._ended.wait(self._period_s):
            after, others = _all_and_others(self._proc)
            stolen, now = _steal(self._proc), time.monotonic()
            ticks = ticks_between(before, others) + stolen - steal
            self._window.append((now, ticks / _TICKS_A_SECOND / (now - last)))
            while self._window[0][0] < now - self._window_s:
                self._window.popleft()
            if now >= known_at:
                self._known.set()
                self._peak = max(self._peak, self.others)
            before, steal, last = after, stolen, now


def ticks_between(before: dict[int, int], after: dict[int, int]) -> int:
    """Of processes (id -> ticks) that are in `after`; new ones began at nothing."""
    return sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in after.items())


def _all_and_others(proc: Path) -> tuple[dict[int, int], dict[int, int]]:
    """The ticks of all processes, and of those that do not descend from this one."""
    processes = _processes(proc)
    own = _tree(processes, os.getpid())
    ticks = {pid: one.own for pid, one in processes.items()}
    return ticks, {pid: num for pid, num in ticks.items() if pid not in own}


def _tree(processes: dict[int, _Process], root: int) -> set[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent].append(pid)
    found, pending = set[int](), [root]
    while pending:
        pid = pending.pop()
        if pid in processes:
            found.add(pid)
        pending += children[pid]
    return found


def _processes(proc: Path) -> dict[int, _Process]:
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        user, system, user_ended, system_ended = (int(one) for one in fields[11:15])
        found[int(folder.name)] = _Process(
            parent=int(fields[1]), own=user + system, ended=user_ended + system_ended
        )
    return found


def _steal(proc: Path) -> int:
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()
    return int(fields[_STEAL]) if len(fields) > _STEAL else 0
