"""What one rank brings to the exchange that opens a step."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Counts made on provisional state: upper bounds, never promises.

    Only a leader's numbers decide anything; the others take part so that hashes are compared.
    """

    rank: int
    leader: bool
    decode_rows: int = 0
    """Sequences that may want a decode row in this step."""
    waiting_tokens: int = 0
    """Prompt tokens whose KV blocks can be reserved right now."""
    waiting_steps: int = 0
    """Steps for which some prompt tokens have been waiting."""
    live_rows: int = 0
    """Rows of the in-flight prefill whose sequence is still wanted."""
    transfer_rows: int = 0
    """KV blocks and messages that may be ready to leave for ranks with other paths."""
    idle: bool = True
    """Nothing queued, running or provisional."""
    stop: bool = False
    """No more requests will come."""
    update: int = 0
    """Newest weight version this rank holds ready to install; 0 for none. Of every rank."""
    hashes: tuple[int, ...] = ()
    """Rolling crc32 per (path, role), then of all plans walked so far."""

    def pack(self) -> bytes:
        """Fixed-size bytes: 55, and 4 for each hash."""
        head = _HEAD.pack(*_VALUES(self))
        return head + struct.pack(f"<{len(self.hashes)}I", *self.hashes)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        head = _HEAD.unpack_from(data)
        size = _HEAD.size
        hashes = struct.unpack(f"<{(len(data) - size) // 4}I", data[size:])
        return cls(**dict(zip(_NAMES, head, strict=True)), hashes=hashes)


_HEAD = struct.Struct("<i?qqqqq??q")
_NAMES = tuple(field.name for field in fields(Proposal) if field.name != "hashes")
_VALUES = attrgetter(*_NAMES)
