"""The requests a forward pass may make of the world, and the only place that yields.

A forward pass is an ``async def`` that suspends at every collective. It is not asyncio: whoever
drives it (the sequencer, `run_straight`, a test) answers the request it suspended on. Everything
above the trap is ordinary ``await``; nothing else in this project contains a ``yield`` that
suspends a forward pass.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

# Made for every collective, on the way from one computation to the next: to freeze them would make
# them three times as dear.


@dataclass(slots=True, kw_only=True)
class Gather:
    """Every member's payload, in group order. All members' payloads have the same shape.

    The answer is a list with one payload per member, the caller's own included.
    """

    role: str
    stage: str
    payload: Any


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Rows of `payload` change hands inside a group; nothing is summed.

    The first ``send[0]`` rows go to member 0, the next ``send[1]`` to member 1, and so on;
    ``recv[i]`` rows come from member i. The answer holds the received rows, member 0's first.
    """

    role: str
    stage: str
    payload: Any
    send: tuple[int, ...]
    recv: tuple[int, ...]


Collective = Gather | Exchange


@dataclass(frozen=True, slots=True)
class PreemptionPoint:
    """Nothing is asked for: between two pieces of a computation another path may go first.

    Only who computes next depends on it. The order of collectives does not, nor does any bit. The
    answer is a `Watch` where another path waits; or None, and then nobody does.
    """


@dataclass(frozen=True, slots=True)
class Watch:
    """Compute on until what another path waits for is there."""

    native: object | None
    """Says so to code that does not come back to Python (watch.h); None where nothing does, and
    then only a short while is to be computed."""


@dataclass(frozen=True, slots=True)
class Stretch(PreemptionPoint):
    """The pass can go through its next collectives in one call, where nobody goes in between.

    The answer is the crossing of a communicator over which it does (see `crossing`); or None, and
    then it makes them one by one.
    """

    stages: tuple[str, ...]
    """Of all of them, in order; exchanges of the same role."""
    role: str


@dataclass(frozen=True, slots=True)
class Arrival(PreemptionPoint):
    """Inside a stretch: go on when the message that is crossed has arrived from everybody."""


Forward = Coroutine[Any, Any, Any]
"""A forward pass: suspends on a `Collective`, is resumed with its answer, returns its output. One
that is preemptible also suspends on a `PreemptionPoint`, and is resumed with a `Watch` or None; so
may one suspend on a `Stretch`."""


@dataclass(slots=True, kw_only=True)
class Finish:
    """Wait until a posted collective is done and answer with its result (engine level)."""

    communicator: Any
    handle: Any
    where: object
    """Its `str` is rank, epoch, step, path and stage in words, for whoever looks at a wait. What
    need not be waited for is not put into words."""
    others: tuple[tuple[Any, Any], ...] = ()
    """(communicator, handle) of other collectives whose result can be put to use meanwhile."""
    busy: bool = False
    """There is something to compute meanwhile: if nothing is done, do not wait but answer so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """The answer to a `Finish` of which one of the `others` was done first: the wait goes on."""

    index: int
    """Of the one that was done; the number of `others` if none was, and the caller is `busy`."""
    value: Any


Finishing = Callable[[Any, Any, str], Awaitable[Any]]
"""How to wait for (communicator, handle, where): `finish`, or with use for the time it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """Nothing to do on any rank: sleep until the inbox stirs, at most `ms` milliseconds."""

    ms: int


@types.coroutine
def perform(request: Any) -> Generator[Any, Any, Any]:
    """Suspend on `request`; the driver's answer is returned. The one trap of the project."""
    return (yield request)


async def preemption_point() -> Watch | None:
    """Let another path go first, if one can. What is computed next may ask the answer whether it
    is to stand aside."""
    answer: Watch | None = await perform(_PREEMPTION_POINT)
    return answer


_PREEMPTION_POINT = PreemptionPoint()


async def finish(communicator: Any, handle: Any, where: str) -> Any:
    """The result of a posted collective; nothing else is done meanwhile."""
    return await perform(Finish(communicator=communicator, handle=handle, where=where))
