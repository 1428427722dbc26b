"""Tensors over the window: gathers and exchanges between ranks of one host, by shared memory.

Shapes and dtypes are free; rows travel as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from .collectives import Collective, Gather
from .crossing import Crossing
from .path import Ticket
from .window_channel import Posted, WindowChannel
from .workspace import Workspace


class _Room(NamedTuple):
    """Where a result is put, made once for each shape: a view costs as much as sending a
    kilobyte, and all that is done between two computations is paid for at every collective."""

    key: tuple[str, int]
    """Of the workspace's buffer."""
    buffer: torch.Tensor
    out: torch.Tensor
    """Of the result's shape, in the buffer."""
    address: int
    num_bytes: int
    counts: tuple[int, ...]
    """Of a gather: bytes from each member, and to each."""
    parts: tuple[torch.Tensor, ...] | None
    """Of a gather: `out`, member by member."""


class _Received(NamedTuple):
    """A result that is still to come."""

    posted: Posted
    counts: tuple[int, ...]
    room: _Room


class WindowCommunicator:
    """Gathers and exchanges rows of CPU tensors over a window that nobody else uses.

    `post` has copied the payload when it returns, and nothing moves on its own after that: `result`
    copies what the others have posted into the path's workspace, one buffer per (role, slot), where
    it holds until `slots` further collectives were posted here.
    """

    def __init__(
        self, channel: WindowChannel, *, role: str, workspace: Workspace[torch.Tensor]
    ) -> None:
        self.timeout_s = channel.timeout_s
        self.size = len(channel.members)
        self._channel, self._role, self._workspace = channel, role, workspace
        self._rooms: dict[tuple[Any, ...], _Room] = {}

    def post(self, request: Collective, ticket: Ticket | None) -> _Received:
        payload: torch.Tensor = request.payload
        if not payload.is_contiguous():
            payload = payload.contiguous()
        slot = self._channel.slot_of(ticket)
        shape: tuple[int, ...] = payload.shape
        if isinstance(request, Gather):
            room = self._room(slot, True, shape, payload)
            counts = sent = room.counts
        else:
            rows, *width = shape
            row = payload.nbytes // rows if rows else prod(width) * payload.element_size()
            sent = tuple([num * row for num in request.send])
            counts = tuple([num * row for num in request.recv])
            if sum(request.send) != rows:
                raise ValueError(
                    f"{self._role} {request.stage}: {sum(request.send)} rows to be sent, "
                    f"{rows} in the payload"
                )
            room = self._room(slot, False, (sum(request.recv), *width), payload)
        posted = self._channel.post(request, ticket, payload.data_ptr(), sent)
        return _Received(posted, counts, room)

    def poll(self, handle: _Received) -> bool:
        return self._channel.poll(handle.posted)

    def watch(self, handle: _Received) -> object | None:
        """See `WindowChannel.watch`."""
        return self._channel.watch(handle.posted)

    def result(self, handle: _Received) -> Any:
        posted, counts, room = handle
        self._channel.take(posted, counts, room.address)
        self._workspace.give_back(room.key)
        return room.out if room.parts is None else list(room.parts)

    def abort(self) -> None:
        """Nothing is in flight but bytes in memory."""

    @property
    def can_cross(self) -> bool:
        """Whether passes can go through many collectives in one call."""
        return self._channel.can_cross

    def cross(self, tickets: Sequence[Ticket], among: Sequence[Ticket]) -> Crossing:
        """Of these tickets; see `WindowChannel.cross`."""
        return self._channel.cross(tickets, among)

    def _room(
        self, slot: int, gathered: bool, shape: tuple[int, ...], payload: torch.Tensor
    ) -> _Room:
        """The slot's buffer, lent, for a result whose rows or parts are of the payload's kind;
        `shape`: of a gather's part, or of the whole result."""
        named = slot, gathered, shape, payload.dtype
        room = self._rooms.get(named)
        if room is not None:
            if self._workspace.borrow(room.key, room.num_bytes) is room.buffer:
                return room
            self._workspace.give_back(room.key)
        if len(self._rooms) >= _MOST_ROOMS:
            self._rooms.clear()
        room = self._rooms[named] = self._made(slot, gathered, shape, payload.dtype)
        return room

    def _made(self, slot: int, gathered: bool, shape: tuple[int, ...], dtype: torch.dtype) -> _Room:
        key = self._role, slot
        num_bytes = prod(shape) * dtype.itemsize
        counts = (num_bytes,) * self.size if gathered else ()
        if gathered:
            shape, num_bytes = (self.size, *shape), sum(counts)
        buffer = self._workspace.borrow(key, num_bytes)
        out = buffer[:num_bytes].view(dtype).view(shape)
        parts = tuple(out.unbind(0)) if gathered else None
        return _Room(key, buffer, out, out.data_ptr(), num_bytes, counts, parts)


_MOST_ROOMS = 256
"""Of recent shapes; then they are made anew."""
