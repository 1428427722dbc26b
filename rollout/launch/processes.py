"""The transport of a rank that is a process of its own: windows, gloo or NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from interlace.comm.board import Board
from interlace.comm.communicator import Communicator
from interlace.comm.device_order import DeviceOrder
from interlace.comm.engine_board import EngineBoard
from interlace.comm.post_order import PostOrder
from interlace.comm.shared_serial_device import OnSerialDevice, SharedSerialDevice
from interlace.comm.torch_communicator import ControlCommunicator, TorchCommunicator
from interlace.comm.waiter import RankWaiter, SleepWaiter
from interlace.comm.windows import Unshared, native
from interlace.comm.workspace import Workspace
from interlace.rollout.config import Launch

from .boards import board_of
from .compose import SLOTS
from .launcher import LaunchError
from .transport import AMPLE, Carrier, Groups
from .window_groups import WindowGroups

_MAKING = "every rank makes the communicators"
_TOLD_BYTES = 512
"""What ranks tell one another while windows are made: a name, or the start of an error."""


class ProcessTransport:
    """One rank's communicators: one per (path, role), and those for control, never on NCCL.

    Ranks that share memory use windows, and gloo only to find one another; others use process
    groups, control's always on gloo. On a GPU every path has a stream of its own. In a program
    that has joined a default process group before, that one is used to make them, and kept.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        store: Store,
        launch: Launch,
        engines: Groups = (),
        epoch: int = 0,
    ) -> None:
        """Join the job through `store`. Raises whatever torch raises when ranks do not appear
        within `connect_timeout_s`, and LaunchError if `transport` is window and there is none.
        `engines`: which ranks step together; by default all. `epoch`: that of all tickets posted
        here."""
        self.rank = rank
        self._engines = engines or (tuple(range(world)),)
        self.posts = PostOrder(rank, epoch=epoch)
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
        self.board: Board = board_of(store, rank=rank, world=world, epoch=epoch)
        if len(self._engines) > 1:
            longest = max(launch.exchange_timeout_s, launch.ticket_timeout_s)
            self.board = EngineBoard(self.board, self._engines, silent_s=longest)
        longest = max(launch.load_timeout_s, launch.exchange_timeout_s, launch.ticket_timeout_s)
        self._timeout = timedelta(seconds=longest + 10)
        self._all_ranks = dist.new_group(backend="gloo", timeout=self._timeout)
        self._groups = [self._all_ranks]
        self._control_group = self._all_ranks
        if len(self._engines) > 1:
            self._control_group = self._own_group(self._engines, "gloo")
        self._windows: WindowGroups | None = None
        self._device: SharedSerialDevice | None = None
        try:
            self.carrier = self._choose()
            self._device = self._serial_device()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.waiter: RankWaiter = SleepWaiter() if self._windows is None else self._windows.waiter

    def control(self, timeout_s: float) -> Communicator:
        if self._windows is not None:
            return self._windows.control(timeout_s)
        return ControlCommunicator(self._control_group, timeout_s=timeout_s)

    def group_control(self, groups: Groups, timeout_s: float, name: str = "group") -> Communicator:
        if self._windows is not None:
            return self._windows.group_control(groups, timeout_s, name)
        group = self._own_group(groups, "gloo")
        return ControlCommunicator(group, timeout_s=timeout_s)

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        inner = self._communicator(path, role, groups, num_bytes)
        if self._device is None:
            return inner
        mine = next(group for group in groups if self.rank in group)
        return OnSerialDevice(
            inner, self._device, path=path, role=role, members=mine, waiter=self.waiter
        )

    def _communicator(self, path: str, role: str, groups: Groups, num_bytes: int) -> Communicator:
        if self._windows is not None:
            return self._windows.communicator(
                path, role, groups, num_bytes=num_bytes, workspace=self._workspace(path)
            )
        return TorchCommunicator(
            self._own_group(groups, self._launch.backend),
            role=role,
            workspace=self._workspace(path),
            slots=SLOTS,
            timeout_s=self._launch.ticket_timeout_s,
            stream=self._stream(path),
            order=self._order,
            posts=self.posts,
        )

    def around(self, path: str) -> AbstractContextManager[None]:
        if self._order is None:
            # At every collective, so without the layers of Python around it.
            return torch._C._InferenceMode(True)
        return self._on_stream(path)

    @contextmanager
    def _on_stream(self, path: str) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._stream(path)):
            yield

    def complete(self) -> None:
        """No communicator is made after this, and all ranks know it. Where windows carry
        everything gloo has done its part: its threads wake up a hundred times a second."""
        if self._windows is not None:
            del self._all_ranks, self._control_group
            self._leave_groups()

    clock = staticmethod(time.monotonic)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave all groups. After an error what is in flight is abandoned."""
        if self._windows is not None:
            self._windows.close()
        if self._device is not None:
            self._device.close()
        if error is not None:
            # The end of a gloo group waits for its operations, whichever thread it happens in:
            # a garbage collection would stand still until their deadline. This thread can.
            seconds = self._timeout.total_seconds()
            threading.Thread(target=_hold, args=(list(self._groups), seconds), daemon=True).start()
            for group in self._groups:
                group.abort()
        self._leave_groups()
        self.board.close()

    def _leave_groups(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        if self._joined_here:
            self._joined_here = False
            dist.destroy_process_group()

    def _choose(self) -> Carrier:
        """Windows where they are wanted and possible; a collective of all ranks."""
        launch = self._launch
        if launch.backend == "nccl":
            return Carrier(kind="nccl", why="launch.backend is nccl")
        if launch.transport == "gloo":
            return Carrier(kind="gloo", why="launch.transport is gloo")
        try:
            self._windows = WindowGroups(
                self.rank, self._engines, self._tell, launch, native(), self.posts
            )
        except Unshared as error:
            wanted = "link" if launch.link is not None else "transport"
            if launch.link is not None or launch.transport == "window":
                raise LaunchError(
                    f"launch.{wanted} needs the window, but {error}: "
                    "docs/transport.md says what it takes"
                ) from None
            return Carrier(kind="gloo", why=str(error))
        return Carrier(kind="window", why="all ranks share the memory of one host")

    def _serial_device(self) -> SharedSerialDevice | None:
        slots = self._launch.serial_device_slots
        if not slots:
            return None
        try:
            return SharedSerialDevice.join(self.rank, self._tell, slots)
        except Unshared as error:
            raise LaunchError(f"launch.serial_device_slots needs one host, but {error}") from None

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """A wait inside the library, which looks at no deadline of ours: the watchdog does."""
        self.board.record.waiting(f"rank {self.rank}: {what}")
        yield
        self.board.record.going_on()

    def _tell(self, text: str) -> list[str]:
        told = text.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with self._together(_MAKING):
            dist.all_gather(everybody, mine, group=self._all_ranks)
        return [part.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for part in everybody]

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
            with self._together(_MAKING):
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
