"""What a launcher hands a rank: its communicators, the ambience of its resumes, its clock."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from interlace.comm.communicator import Communicator

Groups = tuple[tuple[int, ...], ...]


class Transport(Protocol):
    """One rank's ends. Every rank asks for the same communicators in the same order."""

    rank: int
    device: torch.device

    def control(self, timeout_s: float) -> Communicator:
        """The group of all ranks on which proposals are exchanged, and nothing else."""
        ...

    def group_control(self, groups: Groups, timeout_s: float) -> Communicator:
        """The control communicator of this rank's own group of a partition of all ranks."""
        ...

    def communicator(self, path: str, role: str, groups: Groups) -> Communicator:
        """This rank's communicator of (path, role); every group of the partition is made."""
        ...

    def around(self, path: str) -> AbstractContextManager[None]:
        """Inference mode, and on a GPU the path's stream, for one resume of its forward pass."""
        ...

    def clock(self) -> float:
        """Seconds; on one host the same for every rank."""
        ...
