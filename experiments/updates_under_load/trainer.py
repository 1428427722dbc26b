"""A trainer that is a process of its own, and may die while it sends.

It dies only once every rank has come: before that, a trainer that is dead is like one that is late,
for which ranks wait until their deadline.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import ItemsView, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from interlace.experiments.updates_under_load.versions import BUCKET_BYTES, Versions
from interlace.rollout.weights_sync import TrainerGroup

HOST = "127.0.0.1"
_TIMEOUT_S = 120.0


class Deadly(Mapping[str, torch.Tensor]):
    """Tensors that end the process once they have been asked for rows so many times."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], left: int) -> None:
        self._tensors, self._left = tensors, left

    def __getitem__(self, name: str) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._tensors[name]

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self._tensors.items()

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def start_trainer(
    folder: Path, port: int, world: int, version: int, dies_after: int = 0
) -> BaseProcess:
    """It is there once this returns. `dies_after`: rows have been read so many times behind those
    of the first bucket, which it holds before it lets the ranks come; 0: it does not die."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])  # imported once for all of them
    what = (folder, port, world, version, dies_after)
    trainer = context.Process(target=_send, args=what, daemon=True)
    trainer.start()
    deadline = time.monotonic() + _TIMEOUT_S
    while trainer.is_alive() and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port), 1.0).close()
            break
        except OSError:
            time.sleep(0.05)
    return trainer


def _send(folder: Path, port: int, world: int, version: int, dies_after: int) -> None:
    torch.set_num_threads(1)
    versions = Versions(folder)
    tensors: Mapping[str, torch.Tensor] = versions.of(version)
    if dies_after:
        first = next(versions.buckets(version))
        tensors = Deadly(tensors, len(first) + dies_after)
    TrainerGroup(HOST, port, world).send(
        tensors, folder, version=version, timeout_s=_TIMEOUT_S, bucket_mib=BUCKET_BYTES >> 20
    )
