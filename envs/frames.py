"""Length-prefixed frames over a file descriptor: 4 bytes, big-endian, then that many bytes."""

from __future__ import annotations

import os
import struct

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""More than any legal request or reply; a larger length means the stream is damaged."""


def read_frame(fd: int) -> bytes | None:
    """The next frame, or None when the other end is closed.

    Raises ValueError for a length over `MAX_FRAME_BYTES`.
    """
    header = _read(fd, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes: at most {MAX_FRAME_BYTES} are sent")
    return _read(fd, size)


def write_frame(fd: int, payload: bytes) -> None:
    """Send one frame, all of it."""
    rest = memoryview(HEADER.pack(len(payload)) + payload)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
