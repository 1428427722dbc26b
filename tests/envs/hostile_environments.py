"""Environments that do what environments do at their worst. Imported by worker processes only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import gymnasium


class Hostile(gymnasium.Env[str, str]):
    """Polite until the action `now`; subclasses say what happens then."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "begin", {}

    def step(self, action: str) -> Any:
        return self.misbehave() if action == "now" else ("fine", 0.0, False, False, {})

    def misbehave(self) -> Any:
        raise NotImplementedError


class RaisesInConstructor(Hostile):
    def __init__(self) -> None:
        raise ValueError("not today")


class RaisesInReset(Hostile):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise KeyError("no such level")


class HangsInReset(Hostile):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(1e6)


class HangsInClose(Hostile):
    def close(self) -> None:
        time.sleep(1e6)


class Raises(Hostile):
    def misbehave(self) -> Any:
        raise RuntimeError("broken \ud800 message")


class RaisesUnprintable(Hostile):
    def misbehave(self) -> Any:
        class Nasty(Exception):
            def __str__(self) -> str:
                raise SystemExit

        raise Nasty


class SysExit(Hostile):
    def misbehave(self) -> Any:
        sys.exit(0)


class Interrupts(Hostile):
    def misbehave(self) -> Any:
        raise KeyboardInterrupt


class OsExit(Hostile):
    def misbehave(self) -> Any:
        os._exit(3)


class Segfault(Hostile):
    def misbehave(self) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1e6)


class KillsItsParent(Hostile):
    def misbehave(self) -> Any:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1e6)


class StopsItsParent(Hostile):
    def misbehave(self) -> Any:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1e6)


class KillsItsGroup(Hostile):
    def misbehave(self) -> Any:
        os.killpg(0, signal.SIGKILL)


class ClosesEverything(Hostile):
    def misbehave(self) -> Any:
        os.closerange(0, 256)
        return "fine", 0.0, False, False, {}


class Sleeps(Hostile):
    def misbehave(self) -> Any:
        time.sleep(1e6)


class IgnoresSignals(Hostile):
    def misbehave(self) -> Any:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass


class Prints(Hostile):
    """200 MB to all the doors there are; no failure, only noise."""

    def misbehave(self) -> Any:
        megabyte = "x" * 1_000_000
        for _ in range(100):
            sys.stdout.write(megabyte)
            os.write(1, megabyte.encode())
        print("quiet", file=sys.stderr, flush=True)
        subprocess.run(["echo", "also quiet"], check=True)
        doors = " ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3))
        return doors, 0.0, False, False, {}


class ReturnsBytes(Hostile):
    def misbehave(self) -> Any:
        return b"fine", 0.0, False, False, {}


class ReturnsNone(Hostile):
    def misbehave(self) -> Any:
        return None, 0.0, False, False, {}


class ReturnsSurrogate(Hostile):
    def misbehave(self) -> Any:
        return "half \ud83d", 0.0, False, False, {}


class ReturnsTooMuch(Hostile):
    def misbehave(self) -> Any:
        return "x" * (2 * 1024 * 1024), 0.0, False, False, {}


class ReturnsNan(Hostile):
    def misbehave(self) -> Any:
        return "fine", float("nan"), False, False, {}


class ReturnsHugeReward(Hostile):
    def misbehave(self) -> Any:
        return "fine", 10**400, False, False, {}


class ReturnsTextReward(Hostile):
    def misbehave(self) -> Any:
        return "fine", "1.0", False, False, {}


class ReturnsNoFlag(Hostile):
    def misbehave(self) -> Any:
        return "fine", 0.0, None, False, {}


class ReturnsFour(Hostile):
    def misbehave(self) -> Any:
        return "fine", 0.0, False, {}


class ReturnsNothing(Hostile):
    def misbehave(self) -> Any:
        return None


class ReturnsListInfo(Hostile):
    def misbehave(self) -> Any:
        return "fine", 0.0, False, False, ["info"]


class ReturnsBadChoices(Hostile):
    def misbehave(self) -> Any:
        return "fine", 0.0, False, False, {"choices": ["a", 2]}


class Allocates(Hostile):
    def misbehave(self) -> Any:
        self.held = []
        while True:
            self.held.append(bytearray(64 * 1024 * 1024))


class LeavesChildren(Hostile):
    """A plain child, one in a session of its own, and a daemon; then the process ends."""

    def misbehave(self) -> Any:
        sleep = [sys.executable, "-c", "import time; time.sleep(1e6)"]
        plain = subprocess.Popen(sleep)
        apart = subprocess.Popen(sleep, start_new_session=True)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            daemon = os.fork()
            if daemon:
                os.write(writer, str(daemon).encode())
                os._exit(0)
            time.sleep(1e6)
        pids = [plain.pid, apart.pid, int(os.read(reader, 20))]
        with open(self.params["path"], "w") as file:
            file.write(" ".join(map(str, pids)))
        if self.params["exits"]:
            os._exit(3)
        return "fine", 0.0, False, False, {}


class LeavesFiles(Hostile):
    """In the folder for temporary files, whose name it tells."""

    def misbehave(self) -> Any:
        path = tempfile.mkdtemp()
        with open(os.path.join(path, "file"), "w") as file:
            file.write("forgotten")
        return path, 0.0, False, False, {}


class ReturnsTwice(Hostile):
    """Forks, and both copies return."""

    def misbehave(self) -> Any:
        os.fork()
        return "fine", 0.0, False, False, {}


class Looks(Hostile):
    """At the environment variable named by the action."""

    def step(self, action: str) -> Any:
        return os.environ.get(action, "not set"), 0.0, False, False, {}


class Unreproducible(Hostile):
    def step(self, action: str) -> Any:
        return str(os.getpid()), 0.0, False, False, {}


class DiesWhenReplayed(Hostile):
    """Ends the process when it lives through its first step a second time."""

    def step(self, action: str) -> Any:
        with open(self.params["path"], "a+") as file:
            file.write("x")
            file.flush()
            if file.tell() > 1:
                os._exit(4)
        return "fine", 0.0, False, False, {}
