"""Which rank goes on next: a seeded draw among those that can. One seed is one schedule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from .collectives import Early, Finish, Forward, Park
from .errors import DeadlockError
from .virtual_clock import VirtualClock

Poison = Callable[[int, BaseException], BaseException]
NOTHING = -1


class Interleaving:
    """Drives the coroutines of all ranks of one process to their ends.

    `speeds` make some ranks fast and others slow: how likely each is to be next, all else equal.
    With a `clock` every resume is a tick, what was put off happens on its tick, and `trace` names
    the rank of every resume. `poison(rank, error)` makes of the error that ended one rank the one
    that ends the others, at the place where each waits; without it they are merely closed.
    """

    def __init__(
        self,
        ranks: Sequence[Forward],
        draw: random.Random,
        *,
        speeds: Sequence[int] | None = None,
        clock: VirtualClock | None = None,
        on_park: Callable[[], None] | None = None,
        poison: Poison | None = None,
    ) -> None:
        self.halted: set[int] = set()
        """Ranks that are not resumed any more, as if their processes had been stopped."""
        self.ends: dict[int, BaseException] = {}
        """How each rank ended that did not return."""
        self.trace = bytearray()
        self._ranks, self._draw, self._clock = ranks, draw, clock
        self._on_park, self._poison = on_park, poison
        self._lots = [rank for rank, lots in enumerate(speeds or ()) for _ in range(lots)]
        self._asked: dict[int, Any] = dict.fromkeys(range(len(ranks)))
        """What each rank waits for; None stands for one that has not begun."""
        self._results: dict[int, Any] = {}
        self._ready = NOTHING
        self._num_parked = 0

    @property
    def returned(self) -> list[int]:
        """Ranks that came to their end in order."""
        return sorted(self._results)

    def run(self) -> list[Any]:
        """What the ranks returned, in rank order. Raises DeadlockError naming every rank's wait
        when nothing can move, and otherwise what a rank raised."""
        while self._asked:
            if self._clock is not None:
                self._clock.tick()
            rank = self._next()
            if rank is not None:
                self._resume(rank, self._ready)
            elif self._clock is None or not self._clock.jump():
                self._fail(None, self._deadlock())
        return [self._results[rank] for rank in range(len(self._ranks))]

    def _resume(self, rank: int, ready: int) -> None:
        request = self._asked.pop(rank)
        self._num_parked -= isinstance(request, Park)
        if self._clock is not None:
            self.trace.append(rank)
        try:
            value = answer(request, ready) if isinstance(request, Finish) else None
            self._asked[rank] = request = self._ranks[rank].send(value)
            self._num_parked += isinstance(request, Park)
        except StopIteration as stop:
            self._results[rank] = stop.value
        except Exception as error:
            self._fail(rank, error)

    def _next(self) -> int | None:
        """Who goes on; what is `_ready` for it is noted."""
        asked = self._asked
        if self._num_parked == len(asked):
            if self._on_park is not None and len(asked) == len(self._ranks):
                self._on_park()
            if self._clock is not None:
                self._clock.jump()
        if not self._lots:
            ready = [rank for rank in asked if self._is_ready(rank)]
            return self._choose(ready)
        stuck = set[int]()
        lots, draw = self._lots, self._draw.random
        for _ in range(2 * len(asked)):
            rank = lots[int(draw() * len(lots))]
            if rank in asked and rank not in stuck:
                if self._is_ready(rank):
                    return rank
                stuck.add(rank)
                if len(stuck) == len(asked):
                    return None
        return self._choose([rank for rank in asked if rank not in stuck and self._is_ready(rank)])

    def _choose(self, ready: Sequence[int]) -> int | None:
        if not ready:
            return None
        rank = self._draw.choice(ready)
        self._is_ready(rank)
        return rank

    def _is_ready(self, rank: int) -> bool:
        self._ready = NOTHING if rank in self.halted else first_ready(self._asked[rank])
        return self._ready != NOTHING

    def _deadlock(self) -> DeadlockError:
        waits = "; ".join(
            f"rank {rank} is stopped" if rank in self.halted else _where(rank, request)
            for rank, request in sorted(self._asked.items())
        )
        done = f"; returned: ranks {sorted(self._results)}" if self._results else ""
        return DeadlockError(f"nothing can move. Waiting: {waits}{done}")

    def _fail(self, culprit: int | None, error: BaseException) -> None:
        if culprit is not None:
            self.ends[culprit] = error
        if self._poison is not None:
            for rank in sorted(self._asked):
                told = error if culprit is None else self._poison(culprit, error)
                try:
                    self._ranks[rank].throw(told)
                except BaseException as own:
                    self.ends[rank] = own
        raise error


def first_ready(request: Any) -> int:
    """What of it is there: 0 for what was asked for, 1 for the first of the others, and so on,
    one more than there are if the rank is busy; NOTHING if it cannot go on."""
    if request is None or isinstance(request, Park):
        return 0
    if isinstance(request, Finish):
        if request.communicator.poll(request.handle):
            return 0
        for index, (communicator, handle) in enumerate(request.others, start=1):
            if communicator.poll(handle):
                return index
        return len(request.others) + 1 if request.busy else NOTHING
    raise TypeError(
        f"a rank suspended on {request!r}; only Finish and Park reach a driver. "
        "Did a forward pass run outside the sequencer, or an asyncio call inside one?"
    )


def answer(request: Finish, ready: int) -> Any:
    """The result of what `first_ready` found."""
    if not ready:
        return request.communicator.result(request.handle)
    if ready > len(request.others):
        return Early(index=ready - 1, value=None)
    communicator, handle = request.others[ready - 1]
    return Early(index=ready - 1, value=communicator.result(handle))


def _where(rank: int, request: Any) -> str:
    return str(request.where) if isinstance(request, Finish) else f"rank {rank} is parked"
