"""What this host's kernel says about a process that may be a rank."""

from __future__ import annotations

import os
import select

from .rank_status import ProcessState

_STATES = {"T": ProcessState.STOPPED, "t": ProcessState.STOPPED}
_GONE = ("Z", "X", "x")


def this_host() -> str:
    """Equal for two processes exactly if they see each other under their process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"process {os.getpid()}"


def started_at(pid: int) -> int:
    """When a process of this host began, in ticks since boot; 0 if there is none.

    With its id it names one process for ever: ids are used again.
    """
    found = _look(pid)
    return 0 if found is None else found[1]


def process_state(pid: int, started: int) -> ProcessState:
    """The state of the process `pid` that began at `started`; one that has ended is gone."""
    found = _look(pid)
    if found is None or found[1] != started or found[0] in _GONE:
        return ProcessState.GONE
    return _STATES.get(found[0], ProcessState.RUNNING)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is there and stopped (SIGSTOP, a debugger)."""
    found = _look(pid)
    return found is not None and found[0] in _STATES


class LivingProcess:
    """A process that was there when this was made.

    Asking whether it has ended costs next to nothing; a look at its state costs more, the more
    threads it has.
    """

    def __init__(self, descriptor: int) -> None:
        """Use `find`."""
        self._descriptor, self._end = descriptor, select.poll()
        self._end.register(descriptor, select.POLLIN)

    @classmethod
    def find(cls, pid: int, started: int) -> LivingProcess | None:
        """None if it has ended, or where the system has no descriptors for processes."""
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return None
        found = cls(descriptor)
        if process_state(pid, started) is ProcessState.GONE:  # looked at after it cannot change
            found.close()
            return None
        return found

    def has_ended(self) -> bool:
        return bool(self._end.poll(0))

    def close(self) -> None:
        os.close(self._descriptor)


def _look(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name is in parentheses and may hold anything, parentheses too.
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError):
        return None
