"""The windows of simulated ranks: the shipped state machine over plain bytes and virtual time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from interlace.comm import window_layout as at
from interlace.comm.link import Link, Visible
from interlace.comm.virtual_clock import VirtualClock
from interlace.comm.window_channel import ByteCommunicator, WindowChannel, WindowEnd
from interlace.comm.window_reference import Fault, Window
from interlace.comm.windows import native

from .violation import Violation

CAPACITY = 4096
"""Bytes of a message; an announcement's head is the largest."""

Delay = Callable[[int, int], int] | None


class SimulatedWindows:
    """The memory of all groups of one host. It outlives an epoch, as shared memory may.

    Where messages take no time, every other rank runs the C++, so the two talk with each other.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._native = native()
        self.memories: dict[tuple[Hashable, tuple[int, ...], int], bytearray] = {}
        self._clock, self._delay, self._epoch = VirtualClock(), cast(Delay, None), 0

    def begin(
        self, clock: VirtualClock, delay: Delay, epoch: int, *, any_epoch: bool = False
    ) -> None:
        """What ends that are made from now on run by; `any_epoch` is the unsafe way."""
        self._any_epoch = any_epoch
        self._clock, self._delay, self._epoch = clock, delay, epoch

    def end(self, key: tuple[str, str], members: tuple[int, ...], rank: int) -> ByteCommunicator:
        """This rank's end of the communicator named `key`."""
        size = at.window_bytes(len(members), self.slots, CAPACITY)
        memories = [
            self.memories.setdefault((key, members, member), bytearray(size)) for member in members
        ]
        path, role = key
        window = self._window(memories, members.index(rank), rank, _crc(path), _crc(role))
        link = None if self._delay is None else _SlowLink(self._clock, self._delay, rank)
        channel = WindowChannel(
            window,
            path=path,
            role=role,
            members=members,
            rank=rank,
            slots=self.slots,
            capacity=CAPACITY,
            timeout_s=1e6,
            waiter=_NoWaiter(),
            clock=self._clock,
            link=cast(Link, link),
            epoch=self._epoch,
        )
        return ByteCommunicator(channel)

    def scribble(
        self, key: tuple[str, str], members: tuple[int, ...], rank: int, slot: int, where: str
    ) -> None:
        """Write over a byte of the message `rank` has in that slot."""
        memory = self.memories[key, members, rank]
        start = slot * at.slot_bytes(len(members), CAPACITY)
        header = at.Header.unpack(memoryview(memory)[start:], len(members))
        places = {
            "magic": at.MAGIC,
            "epoch": at.EPOCH,
            "comm_seq": at.COMM_SEQ,
            "stage": at.STAGE,
            "canary": at.header_bytes(len(members)) + header.num_bytes,
        }
        memory[start + places[where]] ^= 0xFF

    def _window(
        self, memories: list[bytearray], me: int, rank: int, path: int, role: int
    ) -> WindowEnd:
        if self._any_epoch:
            return _AnyEpoch(memories, me, self.slots, CAPACITY, path, role, clock=self._clock)
        if self._delay is None and rank % 2 and self._native is not None:
            end: WindowEnd = self._native.Window(memories, me, self.slots, CAPACITY, path, role)
            return end
        return Window(memories, me, self.slots, CAPACITY, path, role, clock=self._clock)


class _AnyEpoch(Window):
    """Unsafe: believes whatever epoch a message claims."""

    def take(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        counts: Sequence[int],
        out: Any,
    ) -> Fault | None:
        fault = super().take(slot, comm_seq, epoch, seq, stage, kind, counts, out)
        if fault is None or fault[0] != at.MISMATCH:
            return fault
        memory, start = self._memories[fault[1]], self._start(slot)
        place = slice(start + at.EPOCH, start + at.EPOCH + 8)
        memory[place] = epoch.to_bytes(8, "little")
        return self.take(slot, comm_seq, epoch, seq, stage, kind, counts, out)


class _SlowLink:
    """A wire whose messages take as long as is drawn for them."""

    def __init__(self, clock: VirtualClock, delay: Callable[[int, int], int], rank: int) -> None:
        self._clock, self._delay, self._rank = clock, delay, rank

    def send(self, now_ns: int, num_bytes: int, key: Hashable) -> list[Visible]:
        tick = now_ns + self._delay(self._rank, -1)
        self._clock.at(tick)
        return [Visible(key, tick)]


class _NoWaiter:
    """Nobody waits inside a simulation: the clock is told what is to come."""

    def begin(self) -> None: ...

    def arm(self) -> None: ...

    def wait(self, seconds: float) -> None:
        raise Violation("a result was taken before it was there")

    def due(self, at_ns: int) -> None: ...


def _crc(name: str) -> int:
    return zlib.crc32(name.encode())
