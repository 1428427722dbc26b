"""One of two processes that exchange numbers: `python -m interlace.rollout.gloo_round_trip`."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_ROUNDS = 100
_TIMEOUT = timedelta(seconds=30)


def round_trip(store: str, rank: int) -> float:
    """Mean seconds of a gather between the two; RuntimeError if a number arrives changed."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=_TIMEOUT
    )
    try:
        began_at = time.monotonic()
        for number in range(_ROUNDS):
            received = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(received, torch.tensor([2 * number + rank]))
            if [int(one) for one in received] != [2 * number, 2 * number + 1]:
                raise RuntimeError(f"round {number}: sent {2 * number + rank}, got {received}")
        return (time.monotonic() - began_at) / _ROUNDS
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    mean_s = round_trip(sys.argv[1], int(sys.argv[2]))
    print(f"two talk over gloo, {mean_s * 1e3:.2f} ms a round trip")
