"""What ranks that share memory make of it: communicators over windows, and links between ranks."""

from __future__ import annotations

import time
from types import ModuleType

import torch

from interlace.comm.communicator import Communicator
from interlace.comm.link import Link, LinkModel
from interlace.comm.post_order import PostOrder
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import ByteCommunicator, WindowChannel
from interlace.comm.windows import Tell, Windows, meet
from interlace.comm.workspace import Workspace
from interlace.rollout.config import Launch

from .compose import SLOTS
from .transport import Groups

CONTROL_BYTES = 64 << 20
"""Room for a message between control groups: proposals are short, descriptions may be long."""


class WindowGroups:
    """One rank's communicators over windows. Every call is a collective of all ranks."""

    def __init__(
        self,
        rank: int,
        engines: Groups,
        tell: Tell,
        launch: Launch,
        extension: ModuleType | None,
        posts: PostOrder,
    ) -> None:
        """`engines`: which ranks step together.

        Raises Unshared on every rank where one cannot share memory or has no extension.
        """
        met = meet(rank, tell, extension=extension is not None)
        self._windows = Windows(rank, tell, met, extension)
        self._rank, self._engines, self._launch, self._posts = rank, engines, launch, posts
        self._links: dict[str, Link] = {}
        self._control: WindowChannel | None = None
        self.waiter = self._windows.waiter

    def control(self, timeout_s: float) -> Communicator:
        """Over all ranks of an engine; those with other deadlines count its messages together."""
        if self._control is None:
            self._control = self._channel("control", "control", self._engines, CONTROL_BYTES, None)
        return ByteCommunicator(self._control, timeout_s=timeout_s)

    def group_control(self, groups: Groups, timeout_s: float, name: str) -> Communicator:
        channel = self._channel(name, "control", groups, CONTROL_BYTES, None)
        return ByteCommunicator(channel, timeout_s=timeout_s)

    def communicator(
        self,
        path: str,
        role: str,
        groups: Groups,
        *,
        num_bytes: int,
        workspace: Workspace[torch.Tensor],
    ) -> Communicator:
        channel = self._channel(path, role, groups, num_bytes, self._link(path))
        return WindowCommunicator(channel, role=role, workspace=workspace)

    def close(self) -> None:
        """Nothing made here may be used after this."""
        self._windows.close()

    def _channel(
        self, path: str, role: str, groups: Groups, capacity: int, link: Link | None
    ) -> WindowChannel:
        return WindowChannel(
            self._windows.make(path, role, groups, slots=SLOTS, capacity=capacity),
            path=path,
            role=role,
            members=next(group for group in groups if self._rank in group),
            rank=self._rank,
            slots=SLOTS,
            capacity=capacity,
            timeout_s=self._launch.ticket_timeout_s,
            waiter=self.waiter,
            clock=time.monotonic_ns,
            link=link,
            enlarge="launch.window_mib",
            epoch=self._posts.epoch,
            posts=self._posts,
            crosses=self._windows.crosses,
        )

    def _link(self, path: str) -> Link | None:
        link = self._launch.link
        if link is None:
            return None
        model = LinkModel(latency_us=link.latency_us, gbit=link.gbit)
        return self._links.setdefault("" if link.shared else path, Link(model))
