"""A board for ranks on several hosts: each publishes its record in a key-value store."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from .process_state import process_state, this_host
from .rank_record import (
    RECORD_BYTES,
    RankRecord,
    has_said_its_last,
    read_process,
    read_record,
)
from .rank_status import ProcessState, RankStatus

_PERIOD_S = 0.1
_PATIENCE_S, _CLOSING_S = 0.3, 1.0
_HEAD = struct.Struct("<d")
_VERDICT = "verdict"
_CODES = {
    ProcessState.UNKNOWN: b"u",
    ProcessState.RUNNING: b"r",
    ProcessState.STOPPED: b"s",
    ProcessState.GONE: b"g",
}
_STATES = {code[0]: state for state, code in _CODES.items()}


class KeyValueStore(Protocol):
    """What is needed of a torch Store."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...


class StoreBoard:
    """Only a thread of its own talks to the store, whose server may be what has failed.

    Other ranks are seen as they were a few tenths of a second ago; their clocks need not agree.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        world: int,
        clock: Callable[[], float] = time.monotonic,
        host: str | None = None,
    ) -> None:
        """`store`: a connection that nobody else uses, empty at first."""
        self.rank, self.world = rank, world
        self._store, self._clock, self._host = store, clock, host or this_host()
        self._memory = bytearray(RECORD_BYTES)
        self.record = RankRecord(memoryview(self._memory), clock, host=self._host)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._ours: bytes | None = None
        self._verdict: bytes | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="interlace board", daemon=True)
        self._thread.start()

    def is_poisoned(self) -> bool:
        return self._verdict is not None

    def verdict(self) -> bytes | None:
        return self._verdict

    def set_verdict(self, verdict: bytes) -> bytes:
        with self._changed:
            self._ours = self._ours or verdict
            self._changed.notify_all()
            self._changed.wait_for(self.is_poisoned, _PATIENCE_S)
            if self._verdict is None:
                self._verdict = verdict
            return self._verdict

    def statuses(self) -> list[RankStatus]:
        now = self._clock()
        found: list[RankStatus] = []
        told: dict[int, ProcessState] = {}
        for rank in range(self.world):
            payload, received_at = self._seen.get(rank, (b"", 0.0))
            if not payload:
                found.append(RankStatus(rank=rank))
                continue
            (published_at,) = _HEAD.unpack_from(payload)
            states, record = payload[_HEAD.size :][: self.world], payload[_HEAD.size + self.world :]
            if now - received_at < 10 * _PERIOD_S:
                # What it says of itself was true when it could say so.
                told.update(
                    (other, _STATES[code])
                    for other, code in enumerate(states)
                    if code != ord("u") and other != rank
                )
            found.append(read_record(record, rank, received_at - published_at))
        found[self.rank] = read_record(self._memory, self.rank)
        told.update(
            (other, state)
            for other, state in enumerate(self._processes())
            if state is not ProcessState.UNKNOWN
        )
        unknown = ProcessState.UNKNOWN
        return [replace(status, process=told.get(status.rank, unknown)) for status in found]

    def lost(self) -> list[int]:
        """Of this host: those of others are lost to somebody there, who tells."""
        gone = [r for r, s in enumerate(self._processes()) if s is ProcessState.GONE]
        return [rank for rank in gone if not has_said_its_last(self._record_of(rank))]

    def process(self, rank: int) -> int:
        pid, _, _ = read_process(self._record_of(rank))
        alive = self._processes()[rank] in (ProcessState.RUNNING, ProcessState.STOPPED)
        return pid if alive else 0

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    # ---- its thread

    def _live(self) -> None:
        with suppress(RuntimeError):  # the store is gone: what was seen last is all there is
            while True:
                self._exchange()
                with self._changed:
                    if not (self._ours and not self.is_poisoned()):
                        self._changed.wait(_PERIOD_S)
                if self._closed.is_set():
                    self._exchange()  # the last word
                    return

    def _exchange(self) -> None:
        if not self.is_poisoned():
            verdict = None
            if self._ours is not None:
                verdict = self._store.compare_set(_VERDICT, b"", self._ours)
            elif self._store.check([_VERDICT]):
                verdict = self._store.get(_VERDICT)
            if verdict is not None:
                with self._changed:
                    self._verdict = self._verdict or verdict
                    self._changed.notify_all()
        states = b"".join(_CODES[state] for state in self._processes())
        payload = _HEAD.pack(self._clock()) + states + bytes(self._memory)
        self._store.set(str(self.rank), zlib.compress(payload, 1))
        for rank in range(self.world):
            if rank != self.rank and self._store.check([str(rank)]):
                payload = zlib.decompress(self._store.get(str(rank)))
                if payload != self._seen.get(rank, (b"", 0.0))[0]:
                    self._seen[rank] = payload, self._clock()

    def _record_of(self, rank: int) -> bytes | bytearray:
        if rank == self.rank:
            return self._memory
        payload, _ = self._seen.get(rank, (b"", 0.0))
        return payload[_HEAD.size + self.world :] or bytes(RECORD_BYTES)

    def _processes(self) -> list[ProcessState]:
        """Of the ranks of this host; the others are unknown."""
        states = []
        for rank in range(self.world):
            pid, started, host = read_process(self._record_of(rank))
            here = pid and host == self._host
            states.append(process_state(pid, started) if here else ProcessState.UNKNOWN)
        return states
