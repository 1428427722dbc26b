"""A process that hosts episodes, seen from outside: one request in flight, an end one can trust."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, Any, Protocol

from interlace.envs.frames import HEADER, MAX_FRAME_BYTES
from interlace.envs.variables import for_python, present

_GRACE_S = 1.0
"""From SIGTERM, at which a keeper kills what it keeps, to SIGKILL for the keeper itself."""

_HELLO = b'{"op": "hello"}'
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables an environment may see; secrets stay with the caller."""


class HostDied(Exception):
    """The process is gone, and so is everything it had started.

    `idle` says that it ended before this request reached it: the request is not to blame.
    """

    def __init__(self, message: str, *, idle: bool = False) -> None:
        super().__init__(message)
        self.idle = idle


class EnvironmentHost(Protocol):
    """Carries frames to an `EpisodeTable` in some other process.

    One call at a time. A call that was cancelled leaves the host unusable: kill it.
    """

    async def call(self, frame: bytes) -> bytes:
        """The reply. Raises HostDied when the process is gone; after `kill` nothing else."""
        ...

    def kill(self) -> None:
        """End the process, whatever it is doing; returns at once and may be repeated."""
        ...


class SubprocessHost:
    """An EnvironmentHost on this machine: a keeper process with one worker below it.

    Both end when this process does, when `kill` is called, or when the socket closes; what the
    environments started ends with them.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Use `start`."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._hard_kill: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        index: int = 0,
        *,
        memory_bytes: int = 4 * 1024**3,
        start_timeout_s: float = 60.0,
        python: str = sys.executable,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> SubprocessHost:
        """A host that has answered once; `index` is not used. A `HostFactory` as it stands.

        `memory_bytes` bounds the worker's address space. Environments see `variables`, and of this
        process's own only a short list that holds no secrets. Modules are found where this process
        finds them. Raises OSError if `python` cannot be run and RuntimeError, with the end of its
        standard error, if it does not answer within `start_timeout_s` seconds.
        """
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        with tempfile.TemporaryFile() as complaints:
            try:
                # Not asyncio's subprocess: signalling one that has just ended takes its exit
                # status away from asyncio's own waiting thread.
                process = subprocess.Popen(
                    [
                        *(python, "-P", "-m", "interlace.envs.keeper"),
                        *(str(theirs.fileno()), str(os.getpid()), str(memory_bytes)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    pass_fds=(theirs.fileno(),),
                    env=present(_PASSED_ON) | dict(variables) | for_python(),
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
            finally:
                theirs.close()
            host = cls(process, reader, writer)
            try:
                async with asyncio.timeout(start_timeout_s):
                    await host.call(_HELLO)
            except BaseException as error:
                host.kill()
                await host._buried()
                if not isinstance(error, HostDied | TimeoutError):
                    raise
                reason = str(error) or f"no answer within {start_timeout_s:g} s"
                raise RuntimeError(f"{reason}\n{_end_of(complaints)}".rstrip()) from error
        return host

    @property
    def pid(self) -> int:
        """The keeper's process id."""
        return self._process.pid

    async def call(self, frame: bytes) -> bytes:
        """See EnvironmentHost. Raises ValueError for a frame over MAX_FRAME_BYTES."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes: at most {MAX_FRAME_BYTES} are sent")
        killed = self._hard_kill is not None
        idle = killed or self._reader.at_eof() or self._process.poll() is not None
        if not idle and (reply := await exchange(self._reader, self._writer, frame)) is not None:
            return reply
        self.kill()
        raise HostDied(await self._buried(), idle=idle)

    def lend(self, connection: socket.socket) -> None:
        """Whoever is at the other end of this Unix socket makes the calls from now on, over the
        same socket to the process; here a call only says how the process ended."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]
        ours = self._writer.get_extra_info("socket")
        socket.send_fds(connection, [b"!"], [ours.fileno()])

    def kill(self) -> None:
        """See EnvironmentHost."""
        if self._hard_kill is not None:
            return
        # A process that closed its own socket may be about to end with a status worth reporting;
        # the signal only reaches it if it lingers.
        self._signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        self._hard_kill = loop.call_later(_GRACE_S, self._signal, signal.SIGKILL)

    async def _buried(self) -> str:
        """Wait for the end of all processes; how it came, in words."""
        code = await asyncio.to_thread(self._process.wait)
        if self._hard_kill is not None:
            self._hard_kill.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return f"the environment process {_cause(code)}"

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # none if it has ended


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: bytes
) -> bytes | None:
    """One request and its reply; None if the other end has closed, or sent what is no frame."""
    try:
        writer.write(HEADER.pack(len(frame)) + frame)
        await writer.drain()
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return await reader.readexactly(size) if size <= MAX_FRAME_BYTES else None
    except (OSError, asyncio.IncompleteReadError):
        return None


def _cause(code: int) -> str:
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"exited with status {code}"


def _end_of(complaints: IO[Any]) -> str:
    size = complaints.seek(0, os.SEEK_END)
    complaints.seek(max(0, size - 2000))
    return bytes(complaints.read()).decode("utf-8", "replace")
