"""The transport of a rank that is a process of its own: torch.distributed on gloo or NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from interlace.comm.communicator import Communicator
from interlace.comm.device_order import DeviceOrder
from interlace.comm.torch_communicator import ControlCommunicator, TorchCommunicator
from interlace.comm.workspace import Workspace
from interlace.rollout.config import Launch

from .compose import SLOTS
from .transport import Groups


class ProcessTransport:
    """One rank's process groups: one per (path, role), and one for control, always on gloo.

    On a GPU every path has a stream of its own. In a program that has joined a default process
    group before, that one is used to make them, and kept.
    """

    def __init__(self, *, rank: int, world: int, store: Store, launch: Launch) -> None:
        """Join the job through `store`. Raises whatever torch raises when ranks do not appear
        within `connect_timeout_s`."""
        self.rank = rank
        torch.set_num_threads(1)  # the bits of a large batch depend on it
        self._launch = launch
        self.device = torch.device("cpu")
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._order: DeviceOrder | None = None
        self._workspaces: dict[str, Workspace[torch.Tensor]] = {}
        if launch.backend == "nccl":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            self._order = DeviceOrder(self.device)
        self._joined_here = not dist.is_initialized()
        if self._joined_here:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=launch.connect_timeout_s),
            )
        elif (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise ValueError(
                f"this is rank {rank} of {world}, but the default process group that this program "
                f"has joined says {dist.get_rank()} of {dist.get_world_size()}: make them equal"
            )
        longest = max(launch.load_timeout_s, launch.exchange_timeout_s, launch.ticket_timeout_s)
        self._timeout = timedelta(seconds=longest + 10)
        self._control_group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._groups = [self._control_group]

    def control(self, timeout_s: float) -> Communicator:
        return ControlCommunicator(self._control_group, timeout_s=timeout_s)

    def group_control(self, groups: Groups, timeout_s: float) -> Communicator:
        group = self._own_group(groups, "gloo")
        return ControlCommunicator(group, timeout_s=timeout_s)

    def communicator(self, path: str, role: str, groups: Groups) -> Communicator:
        return TorchCommunicator(
            self._own_group(groups, self._launch.backend),
            role=role,
            workspace=self._workspace(path),
            slots=SLOTS,
            timeout_s=self._launch.ticket_timeout_s,
            stream=self._stream(path),
            order=self._order,
        )

    @contextmanager
    def around(self, path: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stream = self._stream(path)
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def clock(self) -> float:
        return time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave all groups. After an error what is in flight is abandoned."""
        if error is not None:
            # The end of a gloo group waits for its operations, whichever thread it happens in:
            # a garbage collection would stand still until their deadline. This thread can.
            seconds = self._timeout.total_seconds()
            threading.Thread(target=_hold, args=(list(self._groups), seconds), daemon=True).start()
        for group in self._groups:
            if error is not None:
                group.abort()
            dist.destroy_process_group(group)
        if self._joined_here:
            dist.destroy_process_group()

    def _stream(self, path: str) -> torch.cuda.Stream | None:
        if self.device.type != "cuda":
            return None
        if path not in self._streams:
            self._streams[path] = torch.cuda.Stream(self.device)
        return self._streams[path]

    def _own_group(self, groups: Groups, backend: str) -> dist.ProcessGroup:
        """Every rank makes every group, in one order, and keeps its own."""
        mine: dist.ProcessGroup | None = None
        for ranks in groups:
            group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
            if self.rank in ranks:
                mine = group
        assert mine is not None, f"rank {self.rank} is in none of {groups}"
        self._groups.append(mine)
        return mine

    def _workspace(self, path: str) -> Workspace[torch.Tensor]:
        device = self.device  # not this object: it would lead from one path to the other

        def allocate(num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        return self._workspaces.setdefault(path, Workspace(path, allocate))


def _hold(groups: list[dist.ProcessGroup], seconds: float) -> None:
    time.sleep(seconds)
    groups.clear()
