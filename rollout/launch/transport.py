"""What a launcher hands a rank: its communicators, the ambience of its resumes, its clock."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from interlace.comm.communicator import Communicator
from interlace.comm.post_order import PostOrder
from interlace.comm.waiter import RankWaiter

Groups = tuple[tuple[int, ...], ...]

AMPLE = 64 << 20
"""Bytes of the largest message where nobody has computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """What moves the bytes between ranks, the same for all of them."""

    kind: str
    """window, gloo, nccl, or local within one process."""
    why: str
    """One line."""


class Transport(Protocol):
    """One rank's ends. Every rank asks for the same communicators in the same order."""

    rank: int
    device: torch.device
    waiter: RankWaiter
    """How this rank waits for any of its communicators."""
    carrier: Carrier

    @property
    def posts(self) -> PostOrder | None:
        """The witness of what this rank posts, where its communicators ask one."""
        ...

    def control(self, timeout_s: float) -> Communicator:
        """The group on which the ranks that step together exchange proposals, and nothing else."""
        ...

    def group_control(self, groups: Groups, timeout_s: float, name: str = "group") -> Communicator:
        """A communicator of byte strings over this rank's own group of a partition of all ranks;
        another one for each `name`."""
        ...

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        """This rank's communicator of (path, role); every group of the partition is made.

        No rank posts more than `num_bytes` in one message.
        """
        ...

    def around(self, path: str) -> AbstractContextManager[None]:
        """Inference mode, and on a GPU the path's stream, for one resume of its forward pass."""
        ...

    def clock(self) -> float:
        """Seconds; on one host the same for every rank."""
        ...
