"""The window in plain Python, slow and obvious: the twin of the C++ in `window.cpp`.

The same functions over the same bytes, so a rank that runs one talks with a rank that runs the
other. Any writable buffer is memory and any clock is time: a simulation runs it in one process.
Between processes it leans on the processor's order of stores, which x86 keeps.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import window_layout as at

Fault = tuple[int, int, bytes]
"""What was found (NOT_THERE, OVERWRITTEN, MISMATCH, CANARY), at which member, its header."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF


class Window:
    """One member's end of a group's windows. Never waits, allocates nothing.

    Two slots are enough because every collective is one in which everybody waits for everybody,
    and a member posts its next only when it has taken its last. Whoever posts k has taken k - 1,
    so everybody had posted k - 1, and had therefore taken k - 2, whose slot is now written over.
    One slot is too few: whoever posts k knows that everybody has posted k - 1, but not that
    everybody has taken it.
    """

    def __init__(
        self,
        memories: Sequence[Any],
        me: int,
        slots: int,
        capacity: int,
        path: int,
        role: int,
        bells: Sequence[Any] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`memories`: every member's, in group order, `window_bytes` each; `me`: this member's
        place. `bells`: the doorbells of the others. `clock`: in nanoseconds."""
        self._memories = [memoryview(memory).cast("B") for memory in memories]
        self._bells = [memoryview(bell).cast("B").cast("I") for bell in bells]
        self._me, self._slots, self._capacity = me, slots, capacity
        self._path, self._role, self._clock = path, role, clock
        size = at.window_bytes(len(memories), slots, capacity)
        if any(len(memory) < size for memory in self._memories):
            raise ValueError(f"a window of {slots} slots of {capacity} bytes needs {size} bytes")

    def post(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        payload: Any,
        counts: Sequence[int],
        visible_at: int = 0,
    ) -> None:
        """Copy the payload into this member's slot, release it, ring.

        `payload` is a buffer or an address; `counts` bytes of it are for each member, in a gather
        all of it for everybody. ValueError if it does not fit.
        """
        members = len(self._memories)
        if len(counts) != members:
            raise ValueError(f"{len(counts)} counts for {members} members")
        num_bytes = counts[0] if kind == at.GATHER else sum(counts)
        if num_bytes > self._capacity:
            raise ValueError(f"{num_bytes} bytes do not fit into a slot of {self._capacity}")
        start, sent = self._start(slot), _bytes_at(payload, num_bytes)
        memory = self._memories[self._me]
        memory[start + at.BEGUN : start + at.BEGUN + 8] = _word(comm_seq + 1)
        data = start + at.header_bytes(members)
        memory[data : data + num_bytes] = sent
        end = data + num_bytes
        memory[end : end + at.CANARY_BYTES] = _word(at.canary(comm_seq))
        head = struct.pack(
            f"<QqIIIIqqqQQ{members}Q",
            at.MAGIC_VALUE,
            visible_at,
            self._path,
            self._role,
            stage,
            kind,
            epoch,
            comm_seq,
            seq,
            num_bytes,
            members,
            *counts,
        )
        memory[start + at.MAGIC : start + at.MAGIC + len(head)] = head
        memory[start + at.RELEASED : start + at.RELEASED + 8] = _word(comm_seq + 1)
        for bell in self._bells:
            ring(bell)

    def postpone(self, slot: int, comm_seq: int, visible_at: int) -> None:
        """This member's message becomes visible later than was said; nothing if it is gone."""
        start = self._start(slot)
        memory = self._memories[self._me]
        if _read(memory, start + at.RELEASED) == comm_seq + 1:
            memory[start + at.VISIBLE_AT : start + at.VISIBLE_AT + 8] = _word(visible_at)

    def poll(self, slot: int, comm_seq: int) -> int:
        """0 if everybody's message can be taken, -1 if one is missing, or when the last of them
        becomes visible."""
        start, last = self._start(slot), 0
        for member, memory in enumerate(self._memories):
            if _read(memory, start + at.RELEASED) <= comm_seq:
                return -1
            if member != self._me:
                last = max(last, _read(memory, start + at.VISIBLE_AT))
        return last if last and last > self._clock() else 0

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
        """Copy everybody's part for this member to `out`, in group order; or say what is wrong.

        `counts`: the bytes each member owes. `out` (a buffer or an address) has room for all; what
        is in it after a fault is void.
        """
        members = len(self._memories)
        start, wanted = self._start(slot), comm_seq + 1
        head = at.header_bytes(members)
        into, done = _bytes_at(out, sum(counts)), 0
        for member, memory in enumerate(self._memories):
            raw = bytes(memory[start : start + head])
            found = at.Header.unpack(raw, members)
            if found.released < wanted:
                return at.NOT_THERE, member, raw
            if found.released > wanted or found.begun != wanted:
                return at.OVERWRITTEN, member, raw
            if found.magic != at.MAGIC_VALUE:
                return at.CANARY, member, raw
            agreed = (self._path, self._role, stage, kind, epoch, comm_seq, seq, members)
            if agreed != (
                found.path,
                found.role,
                found.stage,
                found.kind,
                found.epoch,
                found.comm_seq,
                found.seq,
                found.num_members,
            ):
                return at.MISMATCH, member, raw
            skipped = 0 if kind == at.GATHER else sum(found.counts[: self._me])
            owed = found.counts[self._me]
            if owed != counts[member] or skipped + owed > found.num_bytes:
                return at.MISMATCH, member, raw
            if found.num_bytes > self._capacity:
                return at.CANARY, member, raw
            data = start + head
            if _read(memory, data + found.num_bytes) != at.canary(comm_seq):
                return at.CANARY, member, raw
            into[done : done + owed] = memory[data + skipped : data + skipped + owed]
            done += owed
            if _read(memory, start + at.BEGUN) != wanted:
                return at.OVERWRITTEN, member, bytes(memory[start : start + head])
        return None

    def watch(self, slot: int, comm_seq: int) -> None:
        """Nothing: what is here is not asked without Python."""

    def close(self) -> None:
        """Let go of the memory; not to be used any more."""
        for view in (*self._memories, *self._bells):
            view.release()

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot} of {self._slots}")
        return slot * at.slot_bytes(len(self._memories), self._capacity)


def ring(bell: memoryview) -> None:
    """Announce a message to the rank this doorbell (as 32-bit words) belongs to."""
    bell[at.BELL // 4] = (bell[at.BELL // 4] + 1) & 0xFFFFFFFF
    if bell[at.SLEEPING // 4] and _FUTEX is not None:
        word = ctypes.c_uint32.from_buffer(bell)
        ctypes.CDLL(None).syscall(_FUTEX, ctypes.byref(word), _FUTEX_WAKE, _EVERYBODY, None)


def heard(bell: memoryview) -> int:
    """How many messages were announced so far, modulo 2**32."""
    return int(bell[at.BELL // 4])


def _word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _read(memory: memoryview, offset: int) -> int:
    return int.from_bytes(memory[offset : offset + 8], "little")


def _bytes_at(place: Any, num_bytes: int) -> memoryview:
    if isinstance(place, int):
        if not num_bytes:
            return memoryview(bytearray())
        return memoryview((ctypes.c_char * num_bytes).from_address(place)).cast("B")
    view = memoryview(place).cast("B")
    if len(view) < num_bytes:
        raise ValueError(f"a buffer of {len(view)} bytes where {num_bytes} are needed")
    return view[:num_bytes]
