"""One rank of two over gloo, for tests in which something goes wrong.

Arguments: what goes wrong on rank 1 (die, absent), this rank, the rendezvous file. Rank 0
prints how its collective ended and after how many seconds.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from interlace.comm.collectives import Finish, Gather, perform
from interlace.comm.driver import run_blocking
from interlace.comm.errors import CommunicationError
from interlace.comm.torch_communicator import TorchCommunicator
from interlace.comm.workspace import Workspace

TIMEOUT_S = 1.0


async def gather(communicator: TorchCommunicator, rank: int, stage: str) -> object:
    request = Gather(role="ep", stage=stage, payload=torch.ones(2))
    handle = communicator.post(request, None)
    where = f"rank {rank}: decode/ep {stage}"
    return await perform(Finish(communicator=communicator, handle=handle, where=where))


def main() -> None:
    fault, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=40),
    )
    workspace = Workspace("decode", lambda size: torch.empty(size, dtype=torch.uint8))
    communicator = TorchCommunicator(
        dist.new_group([0, 1]), role="ep", workspace=workspace, slots=2, timeout_s=TIMEOUT_S
    )
    run_blocking(gather(communicator, rank, "healthy"), park=time.sleep)
    if rank == 1 and fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        signal.pause()
    began = time.monotonic()
    try:
        run_blocking(gather(communicator, rank, "broken"), park=time.sleep)
    except CommunicationError as error:
        print(f"{type(error).__name__}|{time.monotonic() - began:.3f}|{error}", flush=True)
    # gloo's threads still wait for the missing rank: an ordinary exit would wait with them.
    os._exit(70)


if __name__ == "__main__":
    main()
