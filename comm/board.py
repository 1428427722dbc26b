"""Where ranks write down what they do, and where the first to fail leaves word for all others."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from .process_state import LivingProcess, process_state
from .rank_record import (
    RECORD_BYTES,
    RankRecord,
    has_said_its_last,
    read_process,
    read_record,
)
from .rank_status import ProcessState, RankStatus
from .shared_memory import SharedMemory


class Board(Protocol):
    """One rank's view of it. Any method but `set_verdict` returns at once."""

    rank: int
    world: int
    record: RankRecord
    """What this rank writes about itself."""

    def is_poisoned(self) -> bool:
        """Whether there is a verdict. Cheap: every wait asks it over and over."""
        ...

    def verdict(self) -> bytes | None:
        """What the first rank to fail has left."""
        ...

    def set_verdict(self, verdict: bytes) -> bytes:
        """Leave word for all ranks and return what they will read: the first writer's.

        This rank's own, if whoever was first does not finish writing.
        """
        ...

    def statuses(self) -> list[RankStatus]:
        """Of all ranks, in their order."""
        ...

    def lost(self) -> list[int]:
        """Ranks whose process has ended without a last word, as far as can be seen. Cheap."""
        ...

    def process(self, rank: int) -> int:
        """The process id of a rank that is on this host and has not ended, else 0."""
        ...

    def close(self) -> None:
        """Neither read nor written any more."""
        ...


_SET, _CLAIM, _LENGTH, _VERDICT = 0, 64, 128, 136
_WORD = struct.Struct("<Q")
_PATIENCE_S = 0.2


def board_bytes(world: int) -> int:
    """The size of the memory a SharedBoard of so many ranks needs."""
    return _room(world) + world * RECORD_BYTES


def _room(world: int) -> int:
    """For the verdict: it quotes the last tickets of every rank."""
    return 65536 + world * RECORD_BYTES


class SharedBoard:
    """A board in memory that all ranks of one host have mapped."""

    def __init__(
        self,
        memory: SharedMemory,
        *,
        rank: int,
        world: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: zeroed, of `board_bytes(world)`."""
        self.rank, self.world = rank, world
        self._memory, self._clock = memory, clock
        self._claims = ctypes.CDLL(None)
        if rank == 0:
            self._claims.sem_init(ctypes.c_void_p(memory.address + _CLAIM), 1, 1)
        self._flag = memory.buffer[_SET : _SET + 1]
        self._views = [
            memory.buffer[at : at + RECORD_BYTES]
            for at in range(_room(world), board_bytes(world), RECORD_BYTES)
        ]
        self.record = RankRecord(self._views[rank], clock)
        self._living: dict[int, LivingProcess] = {}

    def is_poisoned(self) -> bool:
        return self._flag[0] != 0

    def verdict(self) -> bytes | None:
        if not self._flag[0]:
            return None
        (length,) = _WORD.unpack_from(self._memory.buffer, _LENGTH)
        return bytes(self._memory.buffer[_VERDICT : _VERDICT + length])

    def set_verdict(self, verdict: bytes) -> bytes:
        # A semaphore of 1 is taken by exactly one, and nobody waits for it.
        if self._claims.sem_trywait(ctypes.c_void_p(self._memory.address + _CLAIM)) == 0:
            verdict = verdict[: _room(self.world) - _VERDICT]
            buffer = self._memory.buffer
            buffer[_VERDICT : _VERDICT + len(verdict)] = verdict
            _WORD.pack_into(buffer, _LENGTH, len(verdict))
            self._flag[0] = 1
            return verdict
        deadline = self._clock() + _PATIENCE_S
        while not self._flag[0] and self._clock() < deadline:
            time.sleep(0.001)
        return self.verdict() or verdict

    def statuses(self) -> list[RankStatus]:
        found = []
        for rank, view in enumerate(self._views):
            pid, started, _ = read_process(view)
            process = process_state(pid, started) if pid else ProcessState.UNKNOWN
            found.append(replace(read_record(view, rank), process=process))
        return found

    def lost(self) -> list[int]:
        return [
            rank
            for rank, view in enumerate(self._views)
            if not self._lives(rank)
            and read_process(view)[0]
            and not self.process(rank)
            and not has_said_its_last(view)
        ]

    def process(self, rank: int) -> int:
        pid, started, _ = read_process(self._views[rank])
        return pid if pid and process_state(pid, started) is not ProcessState.GONE else 0

    def _lives(self, rank: int) -> bool:
        """False if it has to be looked at."""
        if rank == self.rank:
            return True
        if rank not in self._living:
            pid, started, _ = read_process(self._views[rank])
            if not pid or (found := LivingProcess.find(pid, started)) is None:
                return False
            self._living[rank] = found
        return not self._living[rank].has_ended()

    def close(self) -> None:
        for living in self._living.values():
            living.close()
        self._living.clear()
        self._flag.release()
        for view in self._views:
            view.release()
        self._memory.close()
