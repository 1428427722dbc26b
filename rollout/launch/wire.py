"""Frames between two processes of one host: what would otherwise cost a call of Ray's each."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import threading

from interlace.envs.frames import HEADER

_MAX_FOLDER = len("/tmp/of a length that leaves room")
"""For a folder with sockets in it: the path of a socket has at most 107 characters."""
_MOST_AT_ONCE = 1 << 16


def socket_folder(prefix: str) -> str:
    """A new folder, only this user's, in which sockets can be."""
    tmp = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=prefix, dir=tmp if len(tmp) <= _MAX_FOLDER else "/tmp")


class Door:
    """A place where one process of this host, and of this user, can knock.

    Left open nobody comes in: `close` it, or `open` it once somebody has knocked.
    """

    def __init__(self) -> None:
        self._folder = socket_folder("interlace-")
        self.path = f"{self._folder}/door"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(1)

    def open(self, timeout_s: float) -> socket.socket:
        """The connection to whoever has knocked. TimeoutError if nobody does."""
        self._listening.settimeout(timeout_s)
        try:
            return self._listening.accept()[0]
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing behind; may be repeated."""
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def knock(path: str) -> socket.socket:
    """The connection to whoever has a `Door` at `path`."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


class Wire:
    """Frames over a connected socket. Any thread may send, one receives."""

    def __init__(self, connection: socket.socket, *, patience_s: float) -> None:
        """`patience_s`: how long `receive` waits for a byte."""
        connection.settimeout(patience_s)
        self._socket = connection
        self._unsent, self._received = bytearray(), bytearray()
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Hand over a frame, without waiting for anybody: what the other end does not take yet
        follows in the background. One that is gone gets nothing; `receive` tells."""
        with self._sending:
            follows = bool(self._unsent)
            self._unsent += HEADER.pack(len(frame)) + frame
            if not follows and not self._write():
                threading.Thread(target=self._follow, name="interlace wire", daemon=True).start()

    def receive(self) -> list[bytes]:
        """The frames that are complete, as soon as something has come.

        Raises TimeoutError if nothing does in time, and EOFError if the other end is closed.
        """
        try:
            part = self._socket.recv(_MOST_AT_ONCE)
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other end is closed")
        self._received += part
        frames, at, end = list[bytes](), HEADER.size, len(self._received)
        while at <= end:
            (size,) = HEADER.unpack_from(self._received, at - HEADER.size)
            if at + size > end:
                break
            frames.append(bytes(self._received[at : at + size]))
            at += size + HEADER.size
        del self._received[: at - HEADER.size]
        return frames

    def hang_up(self) -> None:
        """Whoever waits in `receive`, at either end, sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody waits in `receive` any more."""
        with self._sending:
            self._socket.close()

    def _write(self) -> bool:
        """As much as there is room for; whether that was all."""
        try:
            del self._unsent[: os.write(self._socket.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        return not self._unsent

    def _follow(self) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while True:
            room.poll()
            with self._sending:
                if self._write():
                    return
