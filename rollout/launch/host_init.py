"""The first process of a host that is made of namespaces. Everything in the host ends with it.

A script, not a module to import: `python host_init.py NAME NEIGHBOURS`, born into the new
namespaces; NEIGHBOURS are lines of /etc/hosts. It says "ready", then lives until its standard input
is closed, also by the death of whoever held it.
"""

import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    name, neighbours = sys.argv[1:]
    socket.sethostname(name)
    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")  # of this host's processes only
    mount("-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm")  # hosts share no memory
    # Many a real host knows itself by an address that leads nowhere, and so does this one.
    names = Path("/dev/shm/names")
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{neighbours}\n")
    mount("--bind", str(names), "/etc/hosts")
    names.unlink()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries orphans
    print("ready", flush=True)
    sys.stdin.buffer.read()


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
