"""The board of a job: in shared memory if all ranks are on one host, else in the store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from interlace.comm.board import Board, SharedBoard, board_bytes
from interlace.comm.store_board import StoreBoard

from .one_host import share

_STORE_TIMEOUT = timedelta(seconds=5)


def board_of(store: Store, *, rank: int, world: int, epoch: int = 0) -> Board:
    """This rank's end of the job's board; all ranks call it, with the same `epoch`."""
    key = f"interlace board {epoch}"
    memory = share(store, key=key, rank=rank, world=world, num_bytes=board_bytes(world))
    if memory is not None:
        return SharedBoard(memory, rank=rank, world=world)
    # A connection of its own: whoever else waits in the store would keep it waiting.
    untyped: Any = store  # its declaration lacks `clone`, and bytes as values
    own = untyped.clone()
    own.set_timeout(_STORE_TIMEOUT)
    prefixed: Any = PrefixStore(key, own)
    return StoreBoard(prefixed, rank=rank, world=world)
