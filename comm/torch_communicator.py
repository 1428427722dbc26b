"""torch.distributed as a transport: one process group, and on a GPU one stream, per communicator.

NCCL and gloo run the same code. Rows travel as bytes, so every dtype does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collective, Exchange, Gather
from .device_order import DeviceOrder
from .path import Ticket
from .post_order import PostOrder
from .workspace import Workspace

# Renamed in torch 2.13, where the old name warns.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handle:
    work: Any
    request: Collective
    sent: torch.Tensor
    received: torch.Tensor
    shape: tuple[int, ...]
    key: tuple[str, int]


class TorchCommunicator:
    """Gathers and exchanges rows over one process group that nobody else uses.

    Receive buffers come from the path's workspace, one per (role, slot): a result holds until
    `slots` further collectives were posted on this communicator. On a GPU all of it happens on the
    path's `stream`, collectives keep the device's `order`, and the host never waits: `poll` is
    true at once and the stream waits instead.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        role: str,
        workspace: Workspace[torch.Tensor],
        slots: int,
        timeout_s: float,
        stream: torch.cuda.Stream | None = None,
        order: DeviceOrder | None = None,
        posts: PostOrder | None = None,
    ) -> None:
        """`posts`: the rank's witness, the same for all its communicators."""
        self.timeout_s = timeout_s
        self.size = dist.get_world_size(group)
        self._group, self._role, self._workspace, self._slots = group, role, workspace, slots
        self._stream, self._order, self._posts = stream, order, posts
        self._posted = 0

    def post(self, request: Collective, ticket: Ticket | None) -> _Handle:
        if ticket is not None and self._posts is not None:
            self._posts.admit(self._workspace.path, self._role, request, ticket)
        slot = self._posted % self._slots if ticket is None else ticket.slot
        self._posted += 1
        key = self._role, slot
        with self._on_stream():
            payload: torch.Tensor = request.payload.contiguous()
            if self._order is not None and self._stream is not None:
                self._order.before(self._stream)
            if isinstance(request, Gather):
                handle = self._gather(request, payload, key)
            else:
                handle = self._exchange(request, payload, key)
            if self._order is not None and handle.work is not None:
                self._order.after(handle.work)
        return handle

    def poll(self, handle: _Handle) -> bool:
        return handle.work is None or self._stream is not None or handle.work.is_completed()

    def result(self, handle: _Handle) -> Any:
        if handle.work is not None:
            with self._on_stream():
                handle.work.wait()
        self._workspace.give_back(handle.key)
        dtype = handle.request.payload.dtype
        received = handle.received.view(dtype).view(handle.shape)
        return list(received.unbind(0)) if isinstance(handle.request, Gather) else received

    def abort(self) -> None:
        self._group.abort()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _gather(self, request: Gather, payload: torch.Tensor, key: tuple[str, int]) -> _Handle:
        sent = payload.view(-1).view(torch.uint8)
        num_bytes = sent.numel() * self.size
        received = self._workspace.borrow(key, num_bytes)[:num_bytes]
        work = None
        if num_bytes:
            work = _all_gather(received, sent, group=self._group, async_op=True)
        return _Handle(
            work=work,
            request=request,
            sent=sent,
            received=received,
            shape=(self.size, *payload.shape),
            key=key,
        )

    def _exchange(self, request: Exchange, payload: torch.Tensor, key: tuple[str, int]) -> _Handle:
        row_shape = payload.shape[1:]
        row = math.prod(row_shape) * payload.element_size()
        sent = payload.view(-1).view(torch.uint8)
        num_bytes = sum(request.recv) * row
        received = self._workspace.borrow(key, num_bytes)[:num_bytes]
        work = dist.all_to_all_single(
            received,
            sent,
            [rows * row for rows in request.recv],
            [rows * row for rows in request.send],
            group=self._group,
            async_op=True,
        )
        return _Handle(
            work=work,
            request=request,
            sent=sent,
            received=received,
            shape=(sum(request.recv), *row_shape),
            key=key,
        )


class ControlCommunicator:
    """Byte strings of every rank, all equally long, over a gloo group used for nothing else."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.size = dist.get_world_size(group)
        self._group = group

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        sent = torch.frombuffer(bytearray(request.payload), dtype=torch.uint8)
        received = sent.new_empty(sent.numel() * self.size)
        work = _all_gather(received, sent, group=self._group, async_op=True)
        return work, received, sent

    def poll(self, handle: Any) -> bool:
        return bool(handle[0].is_completed())

    def result(self, handle: Any) -> list[bytes]:
        work, received, _ = handle
        work.wait()
        return [part.numpy().tobytes() for part in received.chunk(self.size)]

    def abort(self) -> None:
        self._group.abort()
