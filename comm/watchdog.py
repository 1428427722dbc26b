"""A thread beside each rank's own: says that it lives, and sees that a failure is everybody's."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, Self

from .board import Board
from .diagnosis import SILENT_S, diagnose
from .errors import CollectiveTimeoutError, PeerLostError, RankFailureError
from .rank_status import ProcessState
from .verdict import decode

EXIT_CODE = 70
"""Of a process that its watchdog had to end."""

_PERIOD_S = 0.05
_LONG_S = 0.3
"""In one activity for so long, a thread is worth looking at."""
_OWN_WORDS_S = 0.3
"""So long a rank has to raise a verdict itself before its watchdog speaks for it."""
_EVIDENCE_S = 0.4
"""A lost connection is noticed before the process that lost it counts as ended; on another host
it shows by its silence."""
_FIRST_S = 0.2
"""A wait that looks at its deadline ends so much before its watchdog would."""
_MANY_PLACES = 64


class Watchdog:
    """Begins with ``with``, in the rank's own thread; ends with it.

    `report` is told the failure if the rank's own thread does not raise it soon: it stands still.
    After `exit_after_s` more the process is ended with exit code 70; never, if that is None.
    """

    def __init__(
        self,
        board: Board,
        *,
        report: Callable[[RankFailureError], None],
        exit_after_s: float | None,
        longest_wait: Callable[[float], float] | None = None,
        blocking_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        """`longest_wait(began)`: the seconds that a wait which began then may take. A wait that
        looks at its deadline has ended by then; this is for others. `blocking_s`: where the
        transport may hold the rank's own thread (a GPU), the time after which a thread that has
        told nothing is taken to be in such a wait."""
        self._board, self._report, self._leave = board, report, leave
        self._longest_wait = longest_wait
        self._exit_after_s, self._blocking_s, self._clock = exit_after_s, blocking_s, clock
        self._told = threading.Lock()
        self._over = threading.Event()
        self._acknowledged = False
        self._poisoned_at: float | None = None
        self._beats: deque[float] = deque(maxlen=40)
        self._places: set[tuple[str, int]] = set()
        self._place, self._looked_since = "", 0.0

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._live, name="interlace watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    # ---- in the rank's own thread

    def check(self) -> None:
        """Raise RankFailureError if any rank has failed. Cheap."""
        if self._board.is_poisoned() and (verdict := self._board.verdict()) is not None:
            self._acknowledged = True
            raise RankFailureError(decode(verdict))

    def explain(self, error: BaseException) -> RankFailureError:
        """What this rank has just raised, as the failure that all ranks raise.

        The first rank to fail diagnoses; the others learn what it found.
        """
        self._acknowledged = True
        if isinstance(error, RankFailureError):
            return error
        words = " ".join(f"{type(error).__name__}: {error}".split())
        deadline_s = 0.0
        if isinstance(error, CollectiveTimeoutError):
            deadline_s = self._clock() - self._board.record.moved_at
        elif isinstance(error, PeerLostError):
            self._await_evidence()
        else:
            self._board.record.failed(words)
        return self._settle(deadline_s, words)

    @property
    def silent_s(self) -> float:
        """How long another rank's watchdog may be silent: longer where this one is late too."""
        times = [*self._beats]
        gaps = (later - earlier for earlier, later in pairwise(times))
        return SILENT_S + 4 * max(gaps, default=0.0)

    # ---- the watchdog's thread

    def _live(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self._beat()
            if self._board.is_poisoned():
                self._press()
            elif self._board.lost():
                self._settle(0.0, "")
            elif self._waits_too_long():
                seconds = self._clock() - self._board.record.moved_at
                self._settle(seconds, "CollectiveTimeoutError: its watchdog")
            elif self._is_held():
                self._settle(self._blocking_s or 0.0, "no rank's own thread has told anything")

    def _beat(self) -> None:
        record = self._board.record
        self._beats.append(self._clock())
        if record.moved_at != self._looked_since:
            self._looked_since, self._place = record.moved_at, ""
            self._places.clear()
        if self._clock() - record.moved_at > _LONG_S and len(self._places) < _MANY_PLACES:
            frame = sys._current_frames().get(self._watched)
            if frame is not None:
                self._place = _in_words(frame)
                self._places.add((frame.f_code.co_filename, frame.f_lineno))
        record.beat(self._place, len(self._places))

    def _press(self) -> None:
        """There is a verdict: the rank's own thread raises it, or this one does what is left."""
        now = self._clock()
        if self._poisoned_at is None:
            self._poisoned_at = now
        since = now - self._poisoned_at
        if self._acknowledged or since < _OWN_WORDS_S:
            return
        if self._told.acquire(blocking=False):
            verdict = self._board.verdict()
            assert verdict is not None
            # In a thread: whoever listens may be what has stopped.
            told = RankFailureError(decode(verdict))
            threading.Thread(target=self._report, args=(told,), daemon=True).start()
        if self._exit_after_s is not None and since > self._exit_after_s:
            self._leave(EXIT_CODE)

    def _waits_too_long(self) -> bool:
        record = self._board.record
        if self._longest_wait is None or not record.is_waiting:
            return False
        began = record.moved_at
        return self._clock() - began > self._longest_wait(began) + _FIRST_S

    def _is_held(self) -> bool:
        """Whether, as far as is known, every rank's own thread is inside a wait of the device."""
        if self._blocking_s is None:
            return False
        latest = self._clock() - self._blocking_s
        if self._board.record.moved_at > latest:
            return False
        return all(status.moved_at < latest for status in self._board.statuses())

    # ---- both

    def _settle(self, deadline_s: float, note: str) -> RankFailureError:
        board = self._board
        if not board.is_poisoned():
            found = diagnose(
                board.statuses(),
                by=board.rank,
                now=self._clock(),
                deadline_s=deadline_s,
                note=note,
                silent_s=self.silent_s,
            )
            board.set_verdict(found.encode())
        verdict = board.verdict()
        return RankFailureError(found if verdict is None else decode(verdict))

    def _await_evidence(self) -> None:
        began = self._clock()
        while not self._board.is_poisoned():
            statuses, now = self._board.statuses(), self._clock()
            if diagnose(statuses, by=self._board.rank, now=now, silent_s=self.silent_s).causes:
                return
            elsewhere = any(status.process is ProcessState.UNKNOWN for status in statuses)
            if now - began > _EVIDENCE_S + (self.silent_s if elsewhere else 0.0):
                return
            time.sleep(0.01)


def _in_words(frame: FrameType) -> str:
    """The innermost line, who called it, and the innermost of ours."""
    inner: FrameType | None = frame
    while inner is not None and "interlace" not in inner.f_code.co_filename:
        inner = inner.f_back
    texts = [_line(f) for f in dict.fromkeys((frame, frame.f_back, inner)) if f is not None]
    return " in ".join(texts)


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
