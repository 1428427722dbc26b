"""Programs of forked ranks that end in different ways."""

import os
import signal


def stays(rank: int, size: int, folder: str) -> str:
    """Rank 0 returns, rank 1 waits for ever."""
    if rank:
        signal.pause()
    return f"rank {rank} of {size}"


def dies(rank: int, size: int, folder: str) -> str:
    """Rank 0 raises, rank 1 is killed."""
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("on purpose")
