"""A stretch of a window's collectives, handed as a whole to code that computes between them.

The messages are the same bytes in the same order as one by one, with the same checks
(`crossing.h`), so one member may cross where another does not. What is saved is the way back to
Python and to the sequencer between two of them, and the copies: a payload is made where it is sent
from, and read where it lies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .errors import CommunicationError
from .path import Ticket

Moments = tuple[float, float, float, float, float]
"""Seconds of the host's clock: when the computation up to a message began and ended, when it was
posted and settled; and how much of the last was waiting."""


class NativeCrossing(Protocol):
    """The C++ (`_window.Crossing`)."""

    def address(self) -> int: ...
    def at(self) -> int: ...
    def poll(self) -> bool: ...
    def moments(self) -> list[Moments]: ...
    def fault(self) -> tuple[int, int, int, bytes] | None: ...


Crosses = Callable[[Any, bytes], NativeCrossing]
"""Makes one over a window and packed messages."""


class Crossing:
    """Messages of one communicator that a pass sends and takes in one call.

    While it waits for one it is to a driver as a communicator with a single collective.
    """

    abreast: tuple[Crossing, ...] = ()
    """This and another one, whose messages go by turns, in that order; none if it goes alone."""
    run: object | None = None
    """What computes between the messages, once its pass is ready. Those that are abreast go on only
    together."""

    def __init__(
        self,
        native: NativeCrossing,
        *,
        timeout_s: float,
        error: Callable[[int, tuple[int, int, int, bytes]], CommunicationError],
    ) -> None:
        """`error(nth, fault)`: in words, what is wrong with a message."""
        self.timeout_s = timeout_s
        self._native, self._error = native, error

    @property
    def address(self) -> int:
        """Of the `Crossing` of crossing.h."""
        return self._native.address()

    @property
    def at(self) -> int:
        """Messages that have been crossed."""
        return self._native.at()

    def moments(self) -> list[Moments]:
        """Of those that have been crossed."""
        return self._native.moments()

    def error(self) -> CommunicationError | None:
        """What the pass has found wrong, if anything."""
        fault = self._native.fault()
        return None if fault is None else self._error(self.at, fault)

    def poll(self, handle: None) -> bool:
        """Whether the message it waits for is there."""
        return self._native.poll()

    def result(self, handle: None) -> None:
        """Nothing: the pass takes it."""


def packed(tickets: Sequence[Ticket], kind: int) -> bytes:
    """What all members' headers must say, as crossing.h has it: slot, comm_seq, epoch, seq, stage
    and kind of each."""
    fields = [n for t in tickets for n in (t.slot, t.comm_seq, t.epoch, t.seq, t.op.crc, kind)]
    return struct.pack("<" + len(tickets) * "qqqqII", *fields)
