"""A trainer that is a process of its own, and may die while it sends.

python -m interlace.experiments.updates_under_load.trainer MODEL PORT WORLD VERSION DIES_AFTER
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path

import torch

from interlace.experiments.updates_under_load.versions import Versions
from interlace.rollout.weights_sync import TrainerGroup

HOST = "127.0.0.1"
_TIMEOUT_S = 120.0
_MODULE = "interlace.experiments.updates_under_load.trainer"


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
) -> subprocess.Popen[bytes]:
    """It is there once this returns. `dies_after`: rows have been read so many times; 0: it does
    not die."""
    arguments = [str(folder), *map(str, (port, world, version, dies_after))]
    trainer = subprocess.Popen([sys.executable, "-m", _MODULE, *arguments])
    deadline = time.monotonic() + _TIMEOUT_S
    while trainer.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port), 1.0).close()
            break
        except OSError:
            time.sleep(0.05)
    return trainer


def main(folder: str, port: str, world: str, version: str, dies_after: str) -> None:
    torch.set_num_threads(1)
    tensors: Mapping[str, torch.Tensor] = Versions(Path(folder)).of(int(version))
    if int(dies_after):
        tensors = Deadly(tensors, int(dies_after))
    TrainerGroup(HOST, int(port), int(world)).send(
        tensors, Path(folder), version=int(version), timeout_s=_TIMEOUT_S, bucket_mib=1
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
