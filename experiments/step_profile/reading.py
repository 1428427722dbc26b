"""How fast can one rank read what no cache near it holds?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interlace.moe import kernels
from interlace.moe.linear import Linear

NUM_BYTES = 256 * 1024 * 1024


def read_bytes_per_s(drive: Callable[[Callable[[], Any]], float]) -> float:
    """The faster of torch's sum over 256 MiB and a product of one row with a weight as large.

    Neither alone is a ceiling: where few instructions read ahead, a sum waits for memory that a
    product in huge pages asks for in time. `drive` gives the seconds of a call.
    """
    block = torch.ones(NUM_BYTES // 4)
    found = NUM_BYTES / drive(block.sum)
    del block
    if kernels.instructions():
        weight = Linear(torch.ones(NUM_BYTES // 2 // 4096, 4096, dtype=torch.bfloat16))
        row = torch.ones(1, 4096, dtype=torch.bfloat16)
        found = max(found, NUM_BYTES / drive(lambda: weight(row)))
    return found
