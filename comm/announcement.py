"""One member tells the others of its group something of any length, in one gather most times."""

from __future__ import annotations

import struct

from .collectives import Finishing, Gather, finish
from .communicator import Communicator

HEAD_BYTES = 4096
"""What travels in the first gather; only longer announcements cost a second one."""

_LENGTH = struct.Struct("<I")


async def announce(
    control: Communicator, data: bytes | None, where: str, finishing: Finishing = finish
) -> bytes:
    """The first member's `data`, on every member; the others pass None.

    `control` carries byte strings that are equally long on all members. `where` names the place
    for the error of a wait that never ends.
    """
    room = HEAD_BYTES - _LENGTH.size
    head = bytes(HEAD_BYTES)
    if data is not None:
        head = (_LENGTH.pack(len(data)) + data[:room]).ljust(HEAD_BYTES, b"\0")
    first = await _first_of(control, head, "announcement", where, finishing)
    (length,) = _LENGTH.unpack_from(first)
    told = first[_LENGTH.size : _LENGTH.size + length]
    if length > room:
        rest = data[room:] if data is not None else bytes(length - room)
        told += await _first_of(control, rest, "announcement.rest", where, finishing)
    return told


async def _first_of(
    control: Communicator, payload: bytes, stage: str, where: str, finishing: Finishing
) -> bytes:
    request = Gather(role="control", stage=stage, payload=payload)
    handle = control.post(request, None)
    answers = await finishing(control, handle, where)
    return bytes(answers[0])
