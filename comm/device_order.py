"""Keeps a GPU's collectives in the order they were posted, whatever communicator they run on."""

from __future__ import annotations

from typing import Any

import torch


class DeviceOrder:
    """One per rank and device, handed to all its communicators.

    NCCL gives no order between communicators: kernels of two that wait for one another across
    ranks can hang even if every host posted them in the same order. So each collective starts
    only after the one before it has ended on this device; computation goes on beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None

    def before(self, stream: torch.cuda.Stream) -> None:
        """Work put on `stream` from here on waits for the collective posted last."""
        if self._last is not None:
            stream.wait_event(self._last)

    def after(self, work: Any) -> None:
        """`work` is now the collective posted last."""
        event = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            work.wait()
            event.record(self._side)
        self._last = event
