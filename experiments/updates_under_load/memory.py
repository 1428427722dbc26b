"""The memory of rank processes, from outside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_TITLE = b"RankActor"


def rank_processes(root: int) -> list[int]:
    """The process ids of Ray's rank actors below `root`; those of none: this process holds them."""
    parents, found = {}, []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
        if _TITLE in line and line.startswith(b"ray::"):
            found.append(int(entry))
    return sorted(pid for pid in found if root in _ancestors(pid, parents)) or [root]


def resident_mib(pid: int) -> float:
    """Resident memory that is the process's own."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(samples_mib: Sequence[float]) -> float:
    """MiB by which a straight line through the samples rises from the first to the last."""
    slope, _ = np.polyfit(np.arange(len(samples_mib)), np.array(samples_mib), 1)
    return float(slope) * (len(samples_mib) - 1)


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    above = set()
    while pid := parents.get(pid, 0):
        above.add(pid)
    return above
