"""Two hosts on one machine, to try what breaks between hosts.

A host is a set of Linux namespaces of its own: network, processes, host name, shared memory; files
are those of the machine. A virtual cable joins the two and leads nowhere else. The namespaces have
no names: they last as long as their first process, which lasts as long as the pipe to this one. So
nothing can clash, and nothing is left behind, not even when this process is killed.

Clocks are the machine's: times that two hosts have taken may be compared here, not on real ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Self, TypeVar

from interlace.rollout.config import ConfigError

from .launcher import LaunchError

# <sched.h>; the functions are in `os` only from Python 3.12 on
_FS, _NEW_MOUNTS, _NEW_NAME, _NEW_IPC = 0x200, 0x20000, 0x4000000, 0x8000000
_NEW_PROCESSES, _NEW_NETWORK = 0x20000000, 0x40000000
_ALL = _NEW_MOUNTS | _NEW_NAME | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK

T = TypeVar("T")

_INIT = Path(__file__).with_name("host_init.py")
_OWN_VARIABLES = ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What they say of this machine is wrong in a host."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """10.77.0.1 and 10.77.0.2, on one cable; everything in them is gone after the ``with``.

    Raises ConfigError, which says what is missing, where such hosts cannot be made.
    """
    _check_machine()
    with ExitStack() as stack:
        names = {"interlace-0": "10.77.0.1", "interlace-1": "10.77.0.2"}
        first, second = (stack.enter_context(Host(name, names)) for name in names)
        peer = ("peer", "name", "eth0", "netns", str(second.pid))
        first.ip("link", "add", "eth0", "type", "veth", *peer)
        for host in (first, second):
            host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            host.ip("link", "set", "lo", "up")
        yield first, second


class Host:
    """Programs start in it, see nothing but it, and end with it at the latest."""

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        """`addresses` by the names of hosts, its own among them; it has no network yet."""
        self.name, self.address = name, addresses[name]
        self._addresses = addresses
        self._programs: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        """Its first process, as this process sees it."""
        return self._init.pid

    def __enter__(self) -> Self:
        try:
            self._init = _in_a_thread(lambda: _call("unshare", _ALL), self._start_init)
        except OSError as error:
            raise _cannot_be_made(error) from error
        try:
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Returns once every process in it is gone."""
        self._init.kill()
        while self._init.poll() is None:  # its end waits until each of its programs is buried
            for program in tuple(self._programs):
                program.poll()
            time.sleep(0.005)
        for program in self._programs:
            program.wait()
        for end in (self._init.stdin, self._init.stdout):
            assert end is not None
            end.close()

    def start(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program, in the current folder; what it writes goes to `output`, or where what
        this process writes goes. The keys of a terminal do not reach it."""
        folder = os.getcwd()
        environment = {k: v for k, v in os.environ.items() if k not in _OWN_VARIABLES}

        def start() -> subprocess.Popen[bytes]:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=environment | dict(variables or {}),
                start_new_session=True,
            )
            self._programs.append(program)  # here, where no Ctrl-C comes between
            return program

        return _in_a_thread(lambda: self._move("net", "uts", "ipc", "pid", "mnt"), start)

    def ip(self, *arguments: str) -> None:
        """Run `ip` on its network. Raises LaunchError with what that complains of."""

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(["ip", *arguments], capture_output=True, text=True)

        done = _in_a_thread(lambda: self._move("net"), run)
        if done.returncode:
            raise LaunchError(
                f"{self.name}: ip {' '.join(arguments)}: {' '.join(done.stderr.split())}"
            )

    def _start_init(self) -> subprocess.Popen[bytes]:
        neighbours = "\n".join(
            f"{prefix}{address} {name}"
            for name, address in self._addresses.items()
            for prefix in ("", "::ffff:")  # as a socket for both kinds of addresses sees it
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INIT), self.name, neighbours],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _await_ready(self) -> None:
        assert self._init.stdout is not None
        if (line := self._init.stdout.readline()) != b"ready\n":
            said = (line + self._init.stdout.read()).decode(errors="replace").strip()
            reason = said.splitlines()[-1] if said else "its first process ended"
            raise LaunchError(f"{self.name} could not be made: {reason}")

    def _move(self, *kinds: str) -> None:
        """Move the calling thread into namespaces of this host."""
        with ExitStack() as stack:
            doors = []
            for kind in kinds:
                doors.append(os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY))
                stack.callback(os.close, doors[-1])
            _call("unshare", _FS)  # threads that share a current folder share their files
            for door in doors:
                _call("setns", door, 0)


def _in_a_thread(move: Callable[[], None], act: Callable[[], T]) -> T:
    """Namespaces belong to threads, and a program is born into those of the thread starting it."""

    def both() -> T:
        move()
        return act()

    with ThreadPoolExecutor(1) as passing:
        return passing.submit(both).result()


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _check_machine() -> None:
    if sys.platform != "linux":
        raise ConfigError("two hosts on one machine are made of namespaces: they need Linux")
    if os.geteuid() != 0:
        raise _cannot_be_made(PermissionError(errno.EPERM, "not root"))
    if shutil.which("ip") is None:
        raise ConfigError(
            "two hosts on one machine are joined by the command `ip`, which is not installed: "
            "apt-get install iproute2 (elsewhere the package is called iproute)"
        )


def _cannot_be_made(error: OSError) -> ConfigError:
    if error.errno == errno.EPERM:
        advice = "they need root: run it with sudo, and in a container started with --privileged"
    else:
        advice = "the kernel needs CONFIG_NET_NS, CONFIG_PID_NS, CONFIG_UTS_NS and CONFIG_IPC_NS"
    return ConfigError(
        f"two hosts on one machine are made of namespaces ({error.strerror}): {advice}"
    )
