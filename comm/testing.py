"""LocalWorld: any number of ranks in one process, in a seeded interleaving, with real errors.

Shipped and typed: the same engine code runs here, over gloo and over NCCL. Payloads are opaque;
how to split, join and copy them is handed in, so this file knows no tensor library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .collectives import Collective, Finish, Forward, Gather, Park
from .errors import DeadlockError, DivergedError
from .path import Ticket
from .serial_device import SerialDevice

Key = Hashable


@dataclass(slots=True)
class _Board:
    """The receive slots of one group: (member, slot) -> the last message written there."""

    cells: dict[tuple[int, int], _Message] = field(default_factory=dict)
    readers: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(poster, its count) -> members that have read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    count: int
    ticket: Ticket | None
    parts: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handle:
    request: Collective
    ticket: Ticket | None
    count: int
    slot: int


class LocalCommunicator:
    """A group's slots in this process. Never blocks: `poll` says whether everybody has posted."""

    timeout_s = float("inf")

    def __init__(self, world: LocalWorld, key: Key, members: tuple[int, ...], rank: int) -> None:
        self.key, self.members, self.rank = key, members, rank
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
            unread = set(self.members) - board.readers.get((self.rank, old.count), set())
            if unread:
                world.violations.append(
                    f"{self.key}: rank {self.rank} overwrites slot {slot} (count {old.count}), "
                    f"not yet read by ranks {sorted(unread)}"
                )
        if isinstance(request, Gather):
            parts: Sequence[Any] = [request.payload] * len(self.members)
        else:
            parts = world.split(request.payload, request.send)
        board.cells[cell] = _Message(
            count=count, ticket=ticket, parts=[world.copy(part) for part in parts]
        )
        board.readers.setdefault((self.rank, count), set())
        if ticket is not None and world.device is not None:
            world.device.enqueue(self.rank, (self.key, self.members, count), self.members)
        return _Handle(request=request, ticket=ticket, count=count, slot=slot)

    def poll(self, handle: _Handle) -> bool:
        for member in self.members:
            message = self._board.cells.get((member, handle.slot))
            if message is None or message.count < handle.count:
                return False
        device = self._world.device
        return device is None or device.is_done(self.rank, (self.key, self.members, handle.count))

    def result(self, handle: _Handle) -> Any:
        me = self.members.index(self.rank)
        received = []
        for member in self.members:
            message = self._board.cells[member, handle.slot]
            self._verify(handle, member, message)
            received.append(message.parts[me])
            self._board.readers.setdefault((member, message.count), set()).add(self.rank)
        return received if isinstance(handle.request, Gather) else self._world.concat(received)

    def abort(self) -> None:
        self._board.cells.clear()

    def _verify(self, handle: _Handle, member: int, message: _Message) -> None:
        if not self._world.verify:
            return
        wanted, found = _header(handle.count, handle.ticket), _header(message.count, message.ticket)
        if wanted != found:
            raise DivergedError(
                f"{self.key}: rank {self.rank} waits for {wanted} of rank {member}; "
                f"slot {handle.slot} holds {found}"
            )


def _header(count: int, ticket: Ticket | None) -> str:
    """What travels with the data: the two paths run the same stages, so the path is named too."""
    if ticket is None:
        return f"count {count}"
    return f"count {count} (epoch {ticket.epoch} {ticket.path}/{ticket.op.role} {ticket.op.stage})"


class LocalWorld:
    """N ranks whose steps are chosen by a seeded draw, so one seed is one schedule.

    `split(payload, counts)` gives one part per member, `concat(parts)` joins them, `copy(part)`
    makes what was posted independent of the sender. `serial_slots` > 0 adds a device that runs
    each rank's collectives in the order they were posted, as a GPU does. `alias` makes several
    keys share one communicator's state: the unsafe way, for negative controls, together with
    ``verify=False``, which takes away the header check that would name it.
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
    ) -> None:
        self.size, self.slots, self.verify = size, slots, verify
        self.split, self.concat, self.copy = split, concat, copy
        self.device = SerialDevice(size, serial_slots) if serial_slots else None
        self.violations: list[str] = []
        """Slots that were overwritten before everybody had read them."""
        self._alias = dict(alias or {})
        self._boards: dict[tuple[Key, tuple[int, ...]], _Board] = {}
        self._random = random.Random(seed)

    def communicator(self, key: Key, members: Sequence[int], rank: int) -> LocalCommunicator:
        """This rank's end of the communicator named `key` over `members`."""
        return LocalCommunicator(self, self._alias.get(key, key), tuple(members), rank)

    def board(self, key: Key, members: tuple[int, ...]) -> _Board:
        return self._boards.setdefault((key, members), _Board())

    def run(
        self, ranks: Sequence[Forward], *, on_park: Callable[[], None] | None = None
    ) -> list[Any]:
        """Drive all ranks to their return and give what they returned, in rank order.

        `on_park` is called when every rank is parked (where a single process waits for outside
        work; it may raise to end the world). Raises DeadlockError naming every rank's wait when
        nothing can move.
        """
        try:
            return self._run(ranks, on_park)
        finally:
            for forward in ranks:
                forward.close()

    def _run(self, ranks: Sequence[Forward], on_park: Callable[[], None] | None) -> list[Any]:
        asked: dict[int, Any] = dict.fromkeys(range(len(ranks)))
        results: dict[int, Any] = {}
        while asked:
            ready = [rank for rank, request in asked.items() if _is_ready(request)]
            if not ready:
                waits = "; ".join(request.where for _, request in sorted(asked.items()))
                done = f"; returned: ranks {sorted(results)}" if results else ""
                raise DeadlockError(f"nothing can move. Waiting: {waits}{done}")
            if on_park and len(ready) == self.size and all(map(_is_park, asked.values())):
                on_park()
            rank = self._random.choice(ready)
            request = asked.pop(rank)
            value = request.communicator.result(request.handle) if _is_finish(request) else None
            try:
                asked[rank] = ranks[rank].send(value)
            except StopIteration as stop:
                results[rank] = stop.value
        return [results[rank] for rank in range(len(ranks))]


def _is_park(request: Any) -> bool:
    return isinstance(request, Park)


def _is_finish(request: Any) -> bool:
    return isinstance(request, Finish)


def _is_ready(request: Any) -> bool:
    """None stands for a rank that has not begun."""
    if request is None or isinstance(request, Park):
        return True
    if isinstance(request, Finish):
        return bool(request.communicator.poll(request.handle))
    raise TypeError(
        f"a rank suspended on {request!r}; only Finish and Park reach a driver. "
        "Did a forward pass run outside the sequencer, or an asyncio call inside one?"
    )
