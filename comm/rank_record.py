"""One rank's record on the board: bytes with one writer, readable at any time from anywhere.

Each part is written head first and tail last, with the same number in both, and read tail first:
if the two agree then nothing was written in between.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from .crossing import Moments
from .path import Ticket
from .process_state import started_at, this_host
from .rank_status import Activity, RankStatus, TicketMark

Bytes = memoryview | bytes | bytearray

RECORD_BYTES = 32768

_IDENTITY = struct.Struct("<QQQ80s")  # last: the head, which is 1 once the rest is there
_BEAT = struct.Struct("<QdQ200sQ")  # head, time, places, place, tail
_NOW = struct.Struct("<QQdQQ")  # head, activity, since, length of the text, tail
_MARK = struct.Struct("<Qqqqqddd64sQ")  # head, ticket, times, name, tail
_MARK_BYTES, _POSTED, _SETTLED = _MARK.size, 48, 56
_AT_IDENTITY, _AT_BEAT, _AT_NOW, _AT_TEXT, _AT_RINGS = 0, 128, 384, 512, 4096
_TEXT_BYTES = _AT_RINGS - _AT_TEXT
_PATHS, _KEPT = 10, 16
_ACTIVITIES = tuple(Activity)
_HOST, _WAITING = _ACTIVITIES.index(Activity.HOST), _ACTIVITIES.index(Activity.WAITING)
_TIME = struct.Struct("<d")
_TRIES = 1000


class RankRecord:
    """The writing end. Implements `Progress`; holds the last 16 tickets of each path."""

    def __init__(
        self,
        memory: memoryview,
        clock: Callable[[], float] = time.monotonic,
        host: str | None = None,
    ) -> None:
        """`memory`: RECORD_BYTES zeroed bytes that nobody else writes."""
        self._memory, self._clock = memory, clock
        self._version = 0
        self._moved_at = clock()
        self._rings: dict[str, int] = {}
        """Where each path's ring begins."""
        self._names: dict[tuple[str, str, str], bytes] = {}
        self._beats = 0
        pid = os.getpid()
        self.beat("", 0)
        self._begin(_HOST)
        named = (host or this_host()).encode()[:80]
        _IDENTITY.pack_into(memory, _AT_IDENTITY, 0, pid, started_at(pid), named)
        memory[_AT_IDENTITY] = 1

    @property
    def moved_at(self) -> float:
        """When the rank's own thread last did anything that is told here."""
        return self._moved_at

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self._activity == _WAITING

    # ---- Progress

    def computing(self, ticket: Ticket) -> None:
        now = self._moved_at = self._clock()
        self._mark(ticket, now, 0.0, 0.0)

    def posted(self, ticket: Ticket) -> None:
        _TIME.pack_into(self._memory, self._slot(ticket) + _POSTED, self._clock())

    def settled(self, ticket: Ticket) -> None:
        _TIME.pack_into(self._memory, self._slot(ticket) + _SETTLED, self._clock())

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Moments]) -> None:
        self._moved_at = self._clock()
        for ticket, moment in zip(tickets[-_KEPT:], moments[-_KEPT:], strict=True):
            resumed_at, _, posted_at, settled_at, _ = moment
            self._mark(ticket, resumed_at, posted_at, settled_at)

    def waiting(self, where: str) -> None:
        self._begin(_WAITING, where)

    def going_on(self) -> None:
        self._begin(_HOST)

    # ---- from the watchdog and the rank's end

    def beat(self, place: str, places: int) -> None:
        """The watchdog thread runs; `place`, `places`: see RankStatus."""
        self._beats += 1
        text = place.encode()[-200:]
        _write(self._memory, _AT_BEAT, _BEAT, self._beats, self._clock(), places, text, self._beats)

    def failed(self, error: str) -> None:
        """The rank has raised."""
        self._begin(_ACTIVITIES.index(Activity.FAILED), error)

    def left(self) -> None:
        """The rank has ended its loop in order: its process may go."""
        self._begin(_ACTIVITIES.index(Activity.LEFT))

    def _begin(self, activity: int, text: str = "") -> None:
        memory, told = self._memory, text.encode()[:_TEXT_BYTES]
        size = len(told)
        self._version += 1
        now = self._moved_at = self._clock()
        self._activity = activity
        if size:
            memory[_AT_TEXT : _AT_TEXT + size] = told
        _write(memory, _AT_NOW, _NOW, self._version, activity, now, size, self._version)

    def _mark(self, ticket: Ticket, computing: float, posted: float, settled: float) -> None:
        op = ticket.op
        key = (ticket.path, op.role, op.stage)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = "\0".join(key).encode()[:64]
        version = ticket.seq + 1
        _MARK.pack_into(
            self._memory,
            self._slot(ticket),
            version,
            ticket.epoch,
            ticket.step,
            ticket.seq,
            ticket.comm_seq,
            computing,
            posted,
            settled,
            name,
            version,
        )

    def _slot(self, ticket: Ticket) -> int:
        at = self._rings.get(ticket.path)
        if at is None:
            ring = min(len(self._rings), _PATHS - 1)
            at = self._rings[ticket.path] = _AT_RINGS + ring * _KEPT * _MARK_BYTES
        return at + ticket.path_seq % _KEPT * _MARK_BYTES


def read_record(memory: Bytes, rank: int, shift_s: float = 0.0) -> RankStatus:
    """The record of `rank` as it is now; `shift_s` is added to its times.

    Of what it does, the last look is taken where it is being written all the time, or its writer
    stopped in the middle; a ticket is left out then.
    """
    pid, _, host = read_process(memory)
    if not pid:
        return RankStatus(rank=rank)
    activity, since, text = _read_now(memory)
    _, alive_at, places, place, _ = _latest(memory, _BEAT, _AT_BEAT)
    slots = range(_AT_RINGS, _AT_RINGS + _PATHS * _KEPT * _MARK.size, _MARK.size)
    marks = [_mark(mark, shift_s) for at in slots if (mark := _whole(memory, _MARK, at))]
    return RankStatus(
        rank=rank,
        pid=pid,
        host=host,
        activity=_ACTIVITIES[activity],
        since=since + shift_s,
        where=text,
        alive_at=alive_at + shift_s,
        place=_words(place),
        places=places,
        tickets=tuple(sorted(marks, key=lambda mark: mark.seq)),
    )


def read_process(memory: Bytes) -> tuple[int, int, str]:
    """Process id, its start (see `started_at`) and host of a record; zeros where there is none."""
    head, pid, started, host = _IDENTITY.unpack_from(memory, _AT_IDENTITY)
    return (pid, started, _words(host)) if head else (0, 0, "")


def has_said_its_last(memory: Bytes) -> bool:
    """Whether the rank has failed or left, so that its process may end."""
    activity = _ACTIVITIES[_latest(memory, _NOW, _AT_NOW)[1]]
    return activity in (Activity.FAILED, Activity.LEFT)


def _read_now(memory: Bytes) -> tuple[int, float, str]:
    for _ in range(_TRIES):
        head, activity, since, size, _ = _latest(memory, _NOW, _AT_NOW)
        text = bytes(memory[_AT_TEXT : _AT_TEXT + size]).decode(errors="replace")
        if _NOW.unpack_from(memory, _AT_NOW)[0] == head:
            break
    return activity, since, text


def _write(memory: memoryview, at: int, part: struct.Struct, *fields: object) -> None:
    """Not packed in place: that zeroes first, and a process may be stopped right then."""
    memory[at : at + part.size] = part.pack(*fields)


def _latest(memory: Bytes, part: struct.Struct, at: int) -> tuple[Any, ...]:
    """The fields of a part; some from before and some from after, if its writer has stopped."""
    return _whole(memory, part, at) or part.unpack_from(memory, at)


def _whole(memory: Bytes, part: struct.Struct, at: int) -> tuple[Any, ...] | None:
    """The fields of a part, of which the first is its head and the last its tail.

    None if it has not been written, or its writer has stopped in the middle. All zero for a moment
    where it is packed in place.
    """
    for _ in range(_TRIES):
        tail = part.unpack_from(memory, at)[-1]
        fields = part.unpack_from(memory, at)
        if tail == fields[0] == part.unpack_from(memory, at)[0] != 0:
            return fields
        if not fields[0] and bytes(memory[at : at + part.size]) == bytes(part.size):
            break
    return None


def _mark(fields: tuple[Any, ...], shift_s: float) -> TicketMark:
    path, role, stage = [*_words(fields[8]).split("\0"), "", ""][:3]
    computing, posted, settled = (time + shift_s if time else 0.0 for time in fields[5:8])
    return TicketMark(
        epoch=fields[1],
        step=fields[2],
        seq=fields[3],
        comm_seq=fields[4],
        path=path,
        role=role,
        stage=stage,
        computing_at=computing,
        posted_at=posted,
        settled_at=settled,
    )


def _words(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
