"""Who is ready, who is done, and which of several failures brought the others about."""

from __future__ import annotations

import threading
from collections.abc import Callable

from interlace.rollout.messages import Event, RankFailure, RankReady, RankReport

from .launcher import EventSink, LaunchError

_GRACE_S = 2.0
_LOST_GRACE_S = 2.5
_CONSEQUENCES = ("PeerLostError", "CollectiveTimeoutError")


class RollCall:
    """Counts the ranks of a job and passes their events on; of all failures it passes on one.

    When a rank dies its peers fail too, and often say so first. A failure is therefore held back
    for `grace_s` seconds, in which the cause may come in: a diagnosis of all ranks before
    anything else, then a lost process, a rank that raised, and ranks that merely missed another.
    """

    def __init__(self, world: int, on_event: EventSink, grace_s: float = _GRACE_S) -> None:
        self._world, self._on_event, self._grace_s = world, on_event, grace_s
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._failures: list[RankFailure] = []
        self._cause: RankFailure | None = None
        self._closed = False

    def take(self, event: Event) -> None:
        """Count an event, and pass it on."""
        match event:
            case RankFailure():
                self._fail(event)
                return
            case RankReady():
                self._add(self._ready, event.rank)
        self._on_event(event)
        if isinstance(event, RankReport):  # counted last: whoever waits for it finds it delivered
            self._add(self._ended, event.rank)

    def lost(self, rank: int, why: str) -> None:
        """The process of a rank is gone; of no interest if it had said its last word.

        Its peers see that too, and have a moment to say what they all were doing.
        """
        if rank not in self._ended:
            cause = RankFailure(rank=rank, error=why, traceback="")
            _later(min(_LOST_GRACE_S, self._grace_s), lambda: self._conclude(cause))

    def await_ready(self, seconds: float) -> None:
        """Until every rank is ready. Raises LaunchError naming the failure or who is missing."""
        self._await(self._ready, seconds, "have loaded their weights")

    def await_ended(self, seconds: float) -> None:
        """Until every rank has reported. Raises LaunchError as `await_ready` does."""
        self._await(self._ended, seconds, "have stopped")

    def close(self) -> None:
        """Nothing is passed on any more: what ranks say while they are being ended is no news."""
        with self._changed:
            self._closed = True

    def _add(self, ranks: set[int], rank: int) -> None:
        with self._changed:
            ranks.add(rank)
            self._changed.notify_all()

    def _fail(self, failure: RankFailure) -> None:
        with self._changed:
            self._ended.add(failure.rank)
            self._failures.append(failure)
            first = len(self._failures) == 1
        if failure.diagnosis is not None:
            self._conclude(failure)
        elif first:
            _later(self._grace_s, self._judge)

    def _judge(self) -> None:
        raised = (
            failure for failure in self._failures if not failure.error.startswith(_CONSEQUENCES)
        )
        self._conclude(next(raised, self._failures[0]))

    def _conclude(self, cause: RankFailure) -> None:
        with self._changed:
            if self._closed or self._cause is not None:
                return
            self._cause = cause
            self._changed.notify_all()
        self._on_event(cause)

    def _await(self, ranks: set[int], seconds: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._cause is not None or (len(ranks) == self._world), seconds
            )
            if self._cause is not None:
                raise LaunchError(self._cause.text, self._cause.diagnosis)
            missing = sorted(set(range(self._world)) - ranks)
        if missing:
            raise LaunchError(
                f"not all ranks {what} within {seconds:g} s: {missing} of {self._world} are missing"
            )


def _later(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
