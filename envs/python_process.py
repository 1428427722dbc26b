"""A Python interpreter in a process of its own that outlives mistakes and can always be ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

from interlace.envs.frames import HEADER
from interlace.envs.python_child import NO_CODE, RAISED, RAN, READY
from interlace.envs.variables import for_python, present

Outcome = Literal["ran", "raised", "no code", "timed out", "ended"]

_OUTCOMES: dict[bytes, Outcome] = {RAN: "ran", RAISED: "raised", NO_CODE: "no code"}
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_CUT = b"\n...\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a piece of code.

    `outcome`: "ran", "raised", "no code" (nothing to run, or a syntax error), "timed out" (its
    process was killed) or "ended" (it ended its process).
    """

    outcome: Outcome
    output: str
    """What it printed, tracebacks included; if too long, without the middle, or the end of what
    timed out."""


class PythonProcess:
    """Runs pieces of code one after the other; names persist as long as the process does.

    The process starts with the first code, and again with the first after it ended. It has limits
    for memory, files and open files, a session and a folder of its own, none of this process's
    variables but a short list, and ends with this process. That contains accidents. It is no
    sandbox: the code has the rights of this process.
    """

    def __init__(self, *, seed: int, timeout_s: float, memory_bytes: int, max_bytes: int) -> None:
        """`seed` is that of the module random in every new process; one piece of code may take
        `timeout_s` seconds of wall clock, starting the process apart; `max_bytes` of what it
        prints are kept."""
        self._seed = seed
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._max_bytes = max_bytes
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, code: str) -> Run:
        """Run `code`, for at most the time allowed. Raises OSError or RuntimeError if no process
        can be started."""
        if self._process is None:
            self._start()
        os.ftruncate(self._output, 0)
        outcome: Outcome = "ended"
        try:
            self._socket.settimeout(self._timeout_s)
            payload = code.encode("utf-8", "replace")
            self._socket.sendall(HEADER.pack(len(payload)) + payload)
            outcome = _OUTCOMES.get(self._socket.recv(1), "ended")
        except TimeoutError:
            outcome = "timed out"
        except OSError:
            pass  # it closed its end
        if outcome in ("timed out", "ended"):
            self._end()
        return Run(outcome=outcome, output=self._read_output(outcome))

    def close(self) -> None:
        """End the process and remove its files; may be called twice."""
        self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._output)
            self._folder = None

    def _start(self) -> None:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="python-")
            self._output, path = tempfile.mkstemp(prefix="output-")
            os.unlink(path)
            # So that whoever writes continues at the end after it was emptied.
            fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        self._socket, theirs = socket.socketpair()
        own = {"HOME": self._folder, "TMPDIR": self._folder}
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-s", "-m", "interlace.envs.python_child"),
                    *(str(theirs.fileno()), str(os.getpid())),
                    *(str(self._memory_bytes), str(self._seed)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                cwd=self._folder,
                env=present(_PASSED_ON) | for_python() | own,
                start_new_session=True,
            )
        finally:
            theirs.close()
        # Waited for without a deadline: a busy machine must not cost the code its time.
        if self._socket.recv(1) != READY:
            self._end()
            raise RuntimeError(f"no Python could be started: {self._read_output('ended')}")

    def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._socket.close()

    def _read_output(self, outcome: Outcome) -> str:
        size = os.fstat(self._output).st_size
        if size <= self._max_bytes:
            return os.pread(self._output, size, 0).decode("utf-8", "replace")
        if outcome == "timed out":  # where it ends is chance
            return os.pread(self._output, self._max_bytes, 0).decode("utf-8", "ignore")
        half = max(1, (self._max_bytes - len(_CUT)) // 2)
        ends = os.pread(self._output, half, 0), os.pread(self._output, half, size - half)
        return _CUT.join(ends).decode("utf-8", "ignore")
