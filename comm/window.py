"""Tensors over the window: gathers and exchanges between ranks of one host, by shared memory.

Shapes and dtypes are free; rows travel as bytes.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from .collectives import Collective, Gather
from .path import Ticket
from .window_channel import Posted, WindowChannel
from .workspace import Workspace


class _Received(NamedTuple):
    """A result that is still to come, and where it is put."""

    posted: Posted
    counts: tuple[int, ...]
    out: torch.Tensor
    """Of the result's shape, in the workspace."""
    key: tuple[str, int]
    gathered: bool


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
        self._views: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def post(self, request: Collective, ticket: Ticket | None) -> _Received:
        payload: torch.Tensor = request.payload
        if not payload.is_contiguous():
            payload = payload.contiguous()
        shape: tuple[int, ...] = payload.shape
        gathered = isinstance(request, Gather)
        if isinstance(request, Gather):
            counts = sent = (payload.nbytes,) * self.size
            into = self.size, *shape
        else:
            rows, *width = shape
            row = payload.nbytes // rows if rows else prod(width) * payload.element_size()
            sent = tuple([num * row for num in request.send])
            counts = tuple([num * row for num in request.recv])
            into = sum(request.recv), *width
            if sum(request.send) != rows:
                raise ValueError(
                    f"{self._role} {request.stage}: {sum(request.send)} rows to be sent, "
                    f"{rows} in the payload"
                )
        key = self._role, self._channel.slot_of(ticket)
        out = self._room(key, into, payload.dtype, sum(counts))
        posted = self._channel.post(request, ticket, payload.data_ptr(), sent)
        return _Received(posted, counts, out, key, gathered)

    def poll(self, handle: _Received) -> bool:
        return self._channel.poll(handle.posted)

    def result(self, handle: _Received) -> Any:
        out = handle.out
        self._channel.take(handle.posted, handle.counts, out.data_ptr())
        self._workspace.give_back(handle.key)
        return list(out.unbind(0)) if handle.gathered else out

    def abort(self) -> None:
        """Nothing is in flight but bytes in memory."""

    def _room(
        self, key: tuple[str, int], shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int
    ) -> torch.Tensor:
        """The slot's buffer, lent, as a tensor of this shape."""
        buffer = self._workspace.borrow(key, num_bytes)
        known = self._views.get((*key, shape, dtype))
        if known is not None and known[0] is buffer:
            return known[1]
        view = buffer[:num_bytes].view(dtype).view(shape)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        self._views[(*key, shape, dtype)] = buffer, view
        return view


_MOST_VIEWS = 256
"""Making a view costs as much as sending a kilobyte, so those of recent shapes are kept."""
