"""The process that environments run in: one request at a time over a private socket.

    python -m interlace.envs.worker FD PARENT MEMORY_BYTES

It ends when the other end of FD closes or PARENT ends. Standard output and error lead nowhere, so
an environment that prints can neither damage the protocol nor fill a disk.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from interlace.envs.episode_table import EpisodeTable
from interlace.envs.frames import read_frame, write_frame
from interlace.envs.lifeline import die_with_parent

__all__ = ["EpisodeTable", "main", "serve"]

_MAX_FILE_BYTES = 1024**3


def serve(fd: int, table: EpisodeTable) -> None:
    """Answer requests until the other end closes."""
    owner = os.getpid()
    while (request := read_frame(fd)) is not None:
        reply = table.handle_frame(request)
        if os.getpid() != owner:
            os._exit(0)  # an environment forked and its child returned here: it has no voice
        write_frame(fd, reply)


def main(argv: list[str]) -> int:
    """Set the limits, then serve."""
    fd, parent, memory_bytes = map(int, argv)
    # A session of its own: an environment that signals its process group stays among itself.
    os.setsid()
    die_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(fd, False)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _silence()
    serve(fd, EpisodeTable())
    # Threads and exit hooks of environments have no say in when the process ends.
    os._exit(0)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
