"""Memory in huge pages, for what is read from one end to the other in every step."""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE = 2 * 1024 * 1024
LINE = 64


class Arena:
    """Hands out zeroed memory, piece behind piece in the order of asking.

    A piece lives as long as its tensor; its chunk as long as any piece. Where the system has no
    huge pages it is memory like any other. All of it is there before it is handed out: a huge page
    that a step is the first to write to would take the step milliseconds.
    """

    def __init__(self, chunk_bytes: int = 0) -> None:
        """Chunks are of `chunk_bytes` or more: 0 gives every piece its own."""
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, zero, on a cache line's boundary."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _huge(max(num_bytes, self._chunk_bytes)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // LINE) * LINE
        return piece


def _huge(num_bytes: int) -> torch.Tensor:
    if num_bytes < HUGE_PAGE:
        padded = torch.zeros(num_bytes + LINE, dtype=torch.uint8)
        first = -padded.data_ptr() % LINE
        return padded[first : first + num_bytes]
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + num_bytes].zero_()
