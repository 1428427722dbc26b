"""Communicators for the tests: one per (path, role), made by all ranks in the same order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.collectives import Collective, Forward, Gather
from interlace.comm.communicator import Communicator
from interlace.comm.device_order import DeviceOrder
from interlace.comm.driver import run_blocking
from interlace.comm.path import Ticket
from interlace.comm.torch_communicator import ControlCommunicator, TorchCommunicator
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import ByteCommunicator, WindowChannel
from interlace.comm.windows import Windows, meet, native
from interlace.comm.workspace import Workspace

TIMEOUT_S = 20.0
CAPACITY = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    backend: str
    transport: str
    """window or gloo, on CPU."""
    rank: int
    size: int
    device: torch.device
    _streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    _orders: list[DeviceOrder] = field(default_factory=list)
    _windows: list[Windows] = field(default_factory=list)

    def communicator(
        self,
        path: str,
        role: str,
        groups: Sequence[Sequence[int]],
        slots: int = 2,
        own_stream: bool = False,
    ) -> Communicator:
        """This rank's end; on a GPU on the caller's stream, or on one of the path's own."""
        workspace = Workspace(path, self._allocate)
        if self.transport == "window":
            channel = self._channel(path, role, groups, slots)
            return WindowCommunicator(channel, role=role, workspace=workspace)
        made = [(members, dist.new_group(list(members))) for members in groups]
        group = next(group for members, group in made if self.rank in members)
        return TorchCommunicator(
            group,
            role=role,
            workspace=workspace,
            slots=slots,
            timeout_s=TIMEOUT_S,
            stream=self.stream(path) if own_stream else None,
            order=self._order() if own_stream else None,
        )

    def control(self) -> Communicator:
        if self.transport == "window":
            return ByteCommunicator(self._channel("control", "control", [range(self.size)], 2))
        group = dist.new_group(backend="gloo")
        return ControlCommunicator(group, timeout_s=TIMEOUT_S)

    def stream(self, path: str) -> torch.cuda.Stream | None:
        if self.device.type != "cuda":
            return None
        return self._streams.setdefault(path, torch.cuda.Stream(self.device))

    def around(self, path: str) -> AbstractContextManager[Any]:
        stream = self.stream(path)
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def run(self, rank: Forward) -> Any:
        waiter = self._windows[0].waiter if self._windows else None
        return run_blocking(rank, park=time.sleep, waiter=waiter)

    def close(self) -> None:
        for windows in self._windows:
            windows.close()

    def _channel(
        self, path: str, role: str, groups: Sequence[Sequence[int]], slots: int
    ) -> WindowChannel:
        """The C++ where it is built; on odd ranks its twin, so that they talk with one another."""
        if not self._windows:
            met = meet(self.rank, self._tell, extension=True)
            extension = None if self.rank % 2 else native()
            self._windows.append(Windows(self.rank, self._tell, met, extension))
        windows = self._windows[0]
        return WindowChannel(
            windows.make(path, role, groups, slots=slots, capacity=CAPACITY),
            path=path,
            role=role,
            members=next(list(members) for members in groups if self.rank in members),
            rank=self.rank,
            slots=slots,
            capacity=CAPACITY,
            timeout_s=TIMEOUT_S,
            waiter=windows.waiter,
            clock=time.monotonic_ns,
        )

    def _tell(self, text: str) -> list[str]:
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, text)
        return everybody

    def _order(self) -> DeviceOrder | None:
        if self.device.type == "cuda" and not self._orders:
            self._orders.append(DeviceOrder(self.device))
        return self._orders[0] if self._orders else None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class ListCommunicator:
    """Lists of integers over a tensor transport, so that the toy runs on it unchanged."""

    def __init__(self, inner: Communicator, ranks: Ranks, path: str) -> None:
        self.inner, self.ranks, self.path = inner, ranks, path
        self.timeout_s = inner.timeout_s

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        with self.ranks.around(self.path):
            payload = torch.tensor(request.payload, dtype=torch.int64, device=self.ranks.device)
            return request, self.inner.post(replace(request, payload=payload), ticket)

    def poll(self, handle: Any) -> bool:
        return self.inner.poll(handle[1])

    def result(self, handle: Any) -> Any:
        request, inner = handle
        with self.ranks.around(self.path):
            answer = self.inner.result(inner)
            if isinstance(request, Gather):
                return [part.tolist() for part in answer]
            return answer.tolist()

    def abort(self) -> None:
        self.inner.abort()
