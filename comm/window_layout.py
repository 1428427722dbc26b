"""Where everything is in a window and in a doorbell: the one place, for C++ and Python alike.

A window is the memory one member of a group sends from: `slots` send slots, each a header, the
payload and a canary directly behind it. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

LINE = 64
"""Bytes of a cache line: headers and payloads start on one."""
PAGE = 4096
"""Slots start on a page, so that a slot that was never used costs no memory."""

# Offsets in a slot.
RELEASED = 0
"""comm_seq + 1 of the message that can be read; written last."""
BEGUN = 8
"""comm_seq + 1 of the message that was last begun; written first."""
MAGIC = 16
VISIBLE_AT = 24
"""Nanoseconds of the host's monotonic clock before which others do not see it; 0: at once."""
PATH = 32
ROLE = 36
STAGE = 40
KIND = 44
EPOCH = 48
COMM_SEQ = 56
SEQ = 64
NUM_BYTES = 72
NUM_MEMBERS = 80
COUNTS = 88
"""Bytes for each member, in group order; in a gather all of it for everybody."""

MAGIC_VALUE = 0x65_63_61_6C_72_65_74_6E
CANARY_VALUE = 0x9E37_79B9_7F4A_7C15
CANARY_BYTES = 8

GATHER, EXCHANGE = 1, 2
KINDS = {"Gather": GATHER, "Exchange": EXCHANGE}

# What reading a message may find.
NOT_THERE, OVERWRITTEN, MISMATCH, CANARY = 1, 2, 3, 4
OVER_CAPACITY = 5
"""Of a message that is crossed: it was not begun."""

# A doorbell: how many messages were announced to a rank, and whether it sleeps until the next.
BELL = 0
SLEEPING = 4
DOORBELL_BYTES = 64

_FIXED = struct.Struct("<QQQqIIIIqqqQQ")
_WORD = (1 << 64) - 1


def header_bytes(members: int) -> int:
    """Size of a slot's header, which has a count for each member."""
    return -(-(COUNTS + 8 * members) // LINE) * LINE


def slot_bytes(members: int, capacity: int) -> int:
    """Distance from one slot to the next."""
    return -(-(header_bytes(members) + capacity + CANARY_BYTES) // PAGE) * PAGE


def window_bytes(members: int, slots: int, capacity: int) -> int:
    """Size of the memory of one member."""
    return slots * slot_bytes(members, capacity)


def canary(comm_seq: int) -> int:
    """What stands behind the payload: another value for each message."""
    return (CANARY_VALUE ^ (comm_seq * MAGIC_VALUE)) & _WORD


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What travels in front of a message. Path, role and stage are the crc32 of their names."""

    released: int
    begun: int
    magic: int
    visible_at: int
    path: int
    role: int
    stage: int
    kind: int
    epoch: int
    comm_seq: int
    seq: int
    """Place of the ticket in the order over all paths."""
    num_bytes: int
    num_members: int
    counts: tuple[int, ...]

    @classmethod
    def unpack(cls, data: bytes | memoryview, members: int) -> Self:
        """The header at the start of `data`, of a group of so many members."""
        names = tuple(cls.__dataclass_fields__)[:-1]
        fixed = dict(zip(names, _FIXED.unpack_from(data), strict=True))
        return cls(**fixed, counts=struct.unpack_from(f"<{members}Q", data, COUNTS))
