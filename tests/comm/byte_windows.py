"""Windows between members that are all in one process."""

import zlib
from typing import Any

from interlace.comm.waiter import SleepWaiter
from interlace.comm.window_channel import ByteCommunicator, WindowChannel
from interlace.comm.window_layout import window_bytes
from interlace.comm.window_reference import Window

SLOTS, CAPACITY = 2, 256


class NoWait(SleepWaiter):
    """Never asked to wait."""

    def due(self, at_ns: int) -> None: ...


def ends(
    size: int, *, path: str = "decode", role: str = "ep", **channel: Any
) -> list[ByteCommunicator]:
    """Every member's end of one window of byte strings; `channel`: more for the first one's."""
    memories = [bytearray(window_bytes(size, SLOTS, CAPACITY)) for _ in range(size)]
    names = zlib.crc32(path.encode()), zlib.crc32(role.encode())
    return [
        ByteCommunicator(
            WindowChannel(
                Window(memories, member, SLOTS, CAPACITY, *names, clock=lambda: 0),
                path=path,
                role=role,
                members=range(size),
                rank=member,
                slots=SLOTS,
                capacity=CAPACITY,
                timeout_s=1.0,
                waiter=NoWait(),
                clock=lambda: 0,
                **({} if member else channel),
            )
        )
        for member in range(size)
    ]
