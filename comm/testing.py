"""LocalWorld: any number of ranks in one process, in a seeded interleaving, with real errors.

Shipped and typed: the same engine code runs here, over gloo and over NCCL. Payloads are opaque;
how to split, join and copy them is handed in, so this file knows no tensor library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .collectives import Collective, Forward, Gather
from .errors import DivergedError
from .interleaving import Interleaving, Poison
from .path import Ticket
from .serial_device import SerialDevice
from .virtual_clock import VirtualClock

Key = Hashable


@dataclass(slots=True)
class _Board:
    """The receive slots of one group: (member, slot) -> the last message written there."""

    cells: dict[tuple[int, int], _Message] = field(default_factory=dict)
    readers: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(poster, its count) -> members that have read it."""


class _Message(NamedTuple):
    number: int
    ticket: Ticket | None
    parts: list[Any]
    visible_at: Sequence[int] = ()
    """By member; empty: at once."""


class _Handle(NamedTuple):
    request: Collective
    ticket: Ticket | None
    number: int
    slot: int


class LocalCommunicator:
    """A group's slots in this process. Never blocks: `poll` says whether everybody has posted."""

    timeout_s = float("inf")

    def __init__(self, world: LocalWorld, key: Key, members: tuple[int, ...], rank: int) -> None:
        self.key, self.members, self.rank = key, members, rank
        self._me = members.index(rank)
        self._world = world
        self._board = world.board(key, members)
        self._posted = 0

    def post(self, request: Collective, ticket: Ticket | None) -> _Handle:
        world, board = self._world, self._board
        count = self._posted if ticket is None else ticket.comm_seq
        slot = count % world.slots if ticket is None else ticket.slot
        self._posted += 1
        cell = self.rank, slot
        old = board.cells.get(cell)
        if old is not None:
            read = board.readers.pop((self.rank, old.number), set())
            if len(read) < len(self.members):
                unread = set(self.members) - read
                world.violations.append(
                    f"{self.key}: rank {self.rank} overwrites slot {slot} (count {old.number}), "
                    f"not yet read by ranks {sorted(unread)}"
                )
        if isinstance(request, Gather):
            parts: Sequence[Any] = [request.payload] * len(self.members)
        else:
            parts = world.split(request.payload, request.send)
        board.cells[cell] = _Message(
            number=count,
            ticket=ticket,
            parts=[world.copy(part) for part in parts],
            visible_at=world.arrivals(self.rank, self.members),
        )
        board.readers.setdefault((self.rank, count), set())
        if ticket is not None and world.device is not None:
            world.device.enqueue(self.rank, (self.key, self.members, count), self.members)
        return _Handle(request=request, ticket=ticket, number=count, slot=slot)

    def poll(self, handle: _Handle) -> bool:
        clock = self._world.clock
        now, me = clock.now if clock else 0, self._me
        for member in self.members:
            message = self._board.cells.get((member, handle.slot))
            if message is None or message.number < handle.number:
                return False
            if message.visible_at and message.visible_at[me] > now:
                return False
        device = self._world.device
        return device is None or device.is_done(self.rank, (self.key, self.members, handle.number))

    def result(self, handle: _Handle) -> Any:
        me = self._me
        received = []
        for member in self.members:
            message = self._board.cells[member, handle.slot]
            self._verify(handle, member, message)
            received.append(message.parts[me])
            self._board.readers.setdefault((member, message.number), set()).add(self.rank)
        return received if isinstance(handle.request, Gather) else self._world.concat(received)

    def abort(self) -> None:
        self._board.cells.clear()

    def _verify(self, handle: _Handle, member: int, message: _Message) -> None:
        if not self._world.verify:
            return
        if handle.number != message.number or _names(handle.ticket) != _names(message.ticket):
            wanted = _header(handle.number, handle.ticket)
            raise DivergedError(
                f"{self.key}: rank {self.rank} waits for {wanted} of rank {member}; "
                f"slot {handle.slot} holds {_header(message.number, message.ticket)}"
            )


def _names(ticket: Ticket | None) -> tuple[int, str, str, str] | None:
    """What travels with the data: the two paths run the same stages, so the path is named too."""
    if ticket is None:
        return None
    return ticket.epoch, ticket.path, ticket.op.role, ticket.op.stage


def _header(count: int, ticket: Ticket | None) -> str:
    names = _names(ticket)
    if names is None:
        return f"count {count}"
    epoch, path, role, stage = names
    return f"count {count} (epoch {epoch} {path}/{role} {stage})"


class LocalWorld:
    """N ranks whose steps are chosen by a seeded draw, so one seed is one schedule.

    `split(payload, counts)` gives one part per member, `concat(parts)` joins them, `copy(part)`
    makes what was posted independent of the sender. `serial_slots` > 0 adds a device that runs
    each rank's collectives in the order they were posted, as a GPU does. `alias` makes several
    keys share one communicator's state: the unsafe way, for negative controls, together with
    ``verify=False``, which takes away the header check that would name it. `speeds` and `clock` as
    in `Interleaving`; `delay(sender, receiver)` is the number of ticks a message takes.
    """

    def __init__(
        self,
        size: int,
        *,
        split: Callable[[Any, Sequence[int]], Sequence[Any]],
        concat: Callable[[Sequence[Any]], Any],
        copy: Callable[[Any], Any],
        seed: int = 0,
        slots: int = 2,
        serial_slots: int = 0,
        alias: Mapping[Key, Key] | None = None,
        verify: bool = True,
        speeds: Sequence[int] | None = None,
        clock: VirtualClock | None = None,
        delay: Callable[[int, int], int] | None = None,
    ) -> None:
        self.size, self.slots, self.verify = size, slots, verify
        self.split, self.concat, self.copy = split, concat, copy
        self.device = SerialDevice(size, serial_slots) if serial_slots else None
        self.violations: list[str] = []
        """Slots that were overwritten before everybody had read them."""
        self.clock, self.delay = clock, delay
        self.running: Interleaving | None = None
        self._speeds = speeds
        self._alias = dict(alias or {})
        self._boards: dict[tuple[Key, tuple[int, ...]], _Board] = {}
        self._random = random.Random(seed)

    def communicator(self, key: Key, members: Sequence[int], rank: int) -> LocalCommunicator:
        """This rank's end of the communicator named `key` over `members`."""
        return LocalCommunicator(self, self._alias.get(key, key), tuple(members), rank)

    def board(self, key: Key, members: tuple[int, ...]) -> _Board:
        return self._boards.setdefault((key, members), _Board())

    def arrivals(self, sender: int, members: Sequence[int]) -> tuple[int, ...]:
        """When each member sees what `sender` posts now; empty: at once."""
        clock, delay = self.clock, self.delay
        if clock is None or delay is None:
            return ()
        ticks = tuple(
            clock.now + (delay(sender, member) if member != sender else 0) for member in members
        )
        for tick in ticks:
            if tick > clock.now:
                clock.at(tick)
        return ticks

    def run(
        self,
        ranks: Sequence[Forward],
        *,
        on_park: Callable[[], None] | None = None,
        poison: Poison | None = None,
    ) -> list[Any]:
        """Drive all ranks to their return and give what they returned, in rank order.

        `on_park` is called when every rank is parked (where a single process waits for outside
        work; it may raise to end the world). Raises DeadlockError naming every rank's wait when
        nothing can move. `poison` as in `Interleaving`, which is `running` meanwhile.
        """
        self.running = Interleaving(
            ranks,
            self._random,
            speeds=self._speeds,
            clock=self.clock,
            on_park=on_park,
            poison=poison,
        )
        try:
            return self.running.run()
        finally:
            for forward in ranks:
                forward.close()
