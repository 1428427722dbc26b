"""Keeps one environment process: when it ends, for whatever reason, nothing it started is left.

    python -m interlace.envs.keeper FD PARENT MEMORY_BYTES

Environments fork, daemonise and die as they like. The keeper runs none of their code, so it can
promise: what they leave behind is reparented to it, and killed. It starts the worker with the
socket FD and a private folder for temporary files, waits for the worker's end or SIGTERM (which it
also receives when PARENT ends), kills every descendant, removes the folder, and exits with the
worker's status, 128 + N if signal N ended it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile

from interlace.envs.lifeline import adopt_orphans, die_with_parent


def main(argv: list[str]) -> int:
    """Run one worker from start to end; the exit status is the worker's."""
    fd, parent, memory_bytes = map(int, argv)
    # Blocked before they can be sent: whatever comes early waits for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    adopt_orphans()
    die_with_parent(parent, signal.SIGTERM)
    command = [sys.executable, "-P", "-m", "interlace.envs.worker"]
    arguments = [str(fd), str(os.getpid()), str(memory_bytes)]
    folder = tempfile.mkdtemp(prefix="interlace-")
    variables = os.environ | {"TMPDIR": folder}
    worker = os.posix_spawn(sys.executable, command + arguments, variables, setsigmask=())
    os.close(fd)
    status = _await_end(worker)
    while children := _children(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return status


def _await_end(worker: int) -> int:
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if child == worker:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if child == 0:
                break


def _children(parent: int) -> list[int]:
    if not os.path.isdir("/proc/self"):
        return []
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == parent]


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name is in parentheses and may hold anything, parentheses included.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
