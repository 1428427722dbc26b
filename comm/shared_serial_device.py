"""A serial device for ranks that are processes of one host."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from .collectives import Collective
from .communicator import Communicator
from .path import Ticket
from .serial_device import SerialDevice
from .shared_memory import SharedMemory
from .waiter import Waiter
from .windows import Tell, Unshared

_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<Q16sQ")  # its number, counted from 1; digest; members as bits
_CAPACITY, _HEAD, _MAX_RANKS = 8192, 64, 64
_BYTES = _HEAD + _CAPACITY * _ENTRY.size
_LOOK_AGAIN_NS = 100_000


class SharedSerialDevice:
    """`SerialDevice` for processes: what each rank posts is written down where all can read it.

    A rank only appends to its own log, and every process works out from all logs what has run.
    What can run once can run until it does, so all come to the same; there is no lock to be left
    behind by a rank that is killed.
    """

    def __init__(self, rank: int, logs: Sequence[memoryview], slots: int) -> None:
        """`logs`: by rank, zeroed memory that all processes share; `join` makes it."""
        self._rank, self._logs = rank, logs
        self._device = SerialDevice(len(logs), slots)
        self._taken = [0] * len(logs)
        self._memories: list[SharedMemory] = []

    @classmethod
    def join(cls, rank: int, tell: Tell, slots: int) -> SharedSerialDevice:
        """A collective of all ranks. Raises Unshared on each of them if memory is not shared."""
        memories: list[SharedMemory] = []
        own, failed = None, ""
        try:
            own = SharedMemory.create(_BYTES)
        except (OSError, AttributeError) as error:  # the latter where the system has no memfd
            failed = f"rank {rank} has no memory to share ({error})"
        for peer, name in enumerate(tell("" if own is None else own.name)):
            if peer == rank and own is not None:
                memories.append(own)
                continue
            try:
                memories.append(SharedMemory.open(name, _BYTES))
            except (OSError, ValueError) as error:
                failed = failed or f"rank {rank} cannot open memory of rank {peer} ({error})"
        failures = [text for text in tell(failed) if text]
        if not failures and len(memories) > _MAX_RANKS:
            failures = [f"{len(memories)} ranks are more than {_MAX_RANKS}"]
        if failures:
            for memory in memories:
                memory.close()
            raise Unshared(failures[0])
        device = cls(rank, [memory.buffer for memory in memories], slots)
        device._memories = memories
        return device

    def enqueue(self, entry: str, members: Sequence[int]) -> bytes:
        """Post the collective named so; the answer is its name for `is_done`."""
        digest = hashlib.blake2b(entry.encode(), digest_size=16).digest()
        number, log = self._taken[self._rank] + 1, self._logs[self._rank]
        bits = sum(1 << member for member in members)
        _ENTRY.pack_into(log, _at(number), number, digest, bits)
        _COUNT.pack_into(log, 0, number)
        self._taken[self._rank] = number
        self._device.enqueue(self._rank, digest, tuple(members))
        return digest

    def is_done(self, digest: bytes) -> bool:
        """Whether the collective has run. Takes in what the others have posted."""
        for rank, log in enumerate(self._logs):
            if rank != self._rank:
                self._take_in(rank, log)
        return self._device.is_done(self._rank, digest)

    def close(self) -> None:
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _take_in(self, rank: int, log: memoryview) -> None:
        (written,) = _COUNT.unpack_from(log, 0)
        if written - self._taken[rank] > _CAPACITY:
            raise RuntimeError(f"rank {rank} has posted {_CAPACITY} collectives unread")
        for number in range(self._taken[rank] + 1, written + 1):
            found, digest, bits = _ENTRY.unpack_from(log, _at(number))
            if found != number:
                return  # seen before it is there; it will be
            members = tuple(peer for peer in range(len(self._logs)) if bits >> peer & 1)
            self._device.enqueue(rank, digest, members)
            self._taken[rank] = number


def _at(number: int) -> int:
    return _HEAD + (number - 1) % _CAPACITY * _ENTRY.size


class OnSerialDevice:
    """A communicator whose collectives are done once they have also run on the device."""

    def __init__(
        self,
        inner: Communicator,
        device: SharedSerialDevice,
        *,
        path: str,
        role: str,
        members: Sequence[int],
        waiter: Waiter,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.timeout_s = inner.timeout_s
        self._inner, self._device = inner, device
        self._members, self._waiter, self._clock = tuple(members), waiter, clock
        self._name = f"{path}/{role} of {self._members}"

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        handle = self._inner.post(request, ticket)
        if ticket is None:
            return handle, None
        return handle, self._device.enqueue(f"{self._name} {ticket.comm_seq}", self._members)

    def poll(self, handle: Any) -> bool:
        inner, entry = handle
        if not self._inner.poll(inner):
            return False
        if entry is None or self._device.is_done(entry):
            return True
        # A rank outside this group may be what it waits for, and would not wake this one.
        due: Callable[[int], None] | None = getattr(self._waiter, "due", None)
        if due is not None:
            due(self._clock() + _LOOK_AGAIN_NS)
        return False

    def result(self, handle: Any) -> Any:
        return self._inner.result(handle[0])

    def abort(self) -> None:
        self._inner.abort()
