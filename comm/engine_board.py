"""The board of a job whose ranks step in several groups, as one of them sees it.

Ranks of other engines have other tickets under the same numbers, so a diagnosis is made of one
engine. What it finds ends them all: they are one job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from .board import Board
from .rank_record import RankRecord
from .rank_status import Activity, RankStatus
from .verdict import decode

_LOOK_S = 0.5
_LAST = (Activity.FAILED, Activity.LEFT)


class EngineBoard:
    """Statuses are those of one engine: of one that has lost a rank, else of this rank's own.

    Nobody in an engine of one rank sees it stop. So a rank that has shown no sign of life for
    `silent_s` is lost to the other engines as well.
    """

    def __init__(
        self,
        inner: Board,
        engines: Sequence[Sequence[int]],
        *,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`inner`: of all ranks. `engines`: the ranks of each, all of them in one."""
        self.rank, self.world = inner.rank, inner.world
        self.record: RankRecord = inner.record
        self._inner, self._silent_s, self._clock = inner, silent_s, clock
        self._engines = [tuple(engine) for engine in engines]
        self._own = next(engine for engine in self._engines if inner.rank in engine)
        self._silent: list[int] = []
        self._looked_at = clock()

    def is_poisoned(self) -> bool:
        return self._inner.is_poisoned()

    def verdict(self) -> bytes | None:
        return self._inner.verdict()

    def set_verdict(self, verdict: bytes) -> bytes:
        """It says which replica it is about."""
        found = decode(verdict)
        ranks = tuple(rank.rank for rank in found.ranks)
        if ranks in self._engines:
            name = f"replica {self._engines.index(ranks)} of {len(self._engines)}"
            verdict = replace(found, text=f"{name}: {found.text}").encode()
        return self._inner.set_verdict(verdict)

    def statuses(self) -> list[RankStatus]:
        lost = self.lost()
        shown = next((e for e in self._engines if not set(e).isdisjoint(lost)), self._own)
        return [status for status in self._inner.statuses() if status.rank in shown]

    def lost(self) -> list[int]:
        now = self._clock()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._silent = [s.rank for s in self._inner.statuses() if self._is_silent(s, now)]
        return sorted({*self._inner.lost(), *self._silent})

    def process(self, rank: int) -> int:
        return self._inner.process(rank)

    def close(self) -> None:
        self._inner.close()

    def _is_silent(self, status: RankStatus, now: float) -> bool:
        """Those of its own engine wait for it, and find out by themselves."""
        if status.rank in self._own or not status.alive_at or status.activity in _LAST:
            return False
        return now - status.alive_at > self._silent_s
