"""Ties the life of a process to that of its parent (Linux; elsewhere the closed socket does it)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, by: signal.Signals) -> None:
    """From now on this process receives `by` when process `parent`, its parent, ends.

    Ends this process at once if `parent` has ended already. The kernel watches the thread that
    started this process, not the whole parent: start processes from a thread that lives on.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, int(by))
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose own parent ends become children of this process, not of init."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
