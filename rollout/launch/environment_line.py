"""Requests to an environment's process, past the actor that has started it on this host."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Self

from interlace.envs.host import exchange

from .wire import Door

_LEND_S = 5.0


class EnvironmentLine:
    """The socket of a `SubprocessHost` of another process, once that has lent it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `behind`."""
        self._reader, self._writer = reader, writer
        self._hung_up = select.poll()
        self._hung_up.register(writer.get_extra_info("socket"), 0)

    @classmethod
    async def behind(cls, door: Door) -> Self:
        """What was lent by whoever has knocked at `door`."""
        with door.open(_LEND_S) as connection:
            connection.settimeout(_LEND_S)
            _, (fd, *_), _, _ = socket.recv_fds(connection, 1, 1)
        return cls(*await asyncio.open_unix_connection(sock=socket.socket(fileno=fd)))

    @property
    def is_closed(self) -> bool:
        """Whether the process is gone, or has closed its end."""
        return self._reader.at_eof() or bool(self._hung_up.poll(0))

    async def call(self, frame: bytes) -> bytes | None:
        """The reply; None if the process is gone."""
        return None if self.is_closed else await exchange(self._reader, self._writer, frame)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._writer.close()
