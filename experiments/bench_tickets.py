"""What does a rank's own thread spend on a collective, beside computing and copying?

A toy forward pass of 35 collectives of 8 KB, over a window, driven as a rank drives its own:
sequencer, blocking driver, journal, record on the board, hashes, witness of posts, inference mode.
Timed in it, from the end of one computation to the beginning of the next. Three arms:

* warm: the other's message is there already, and there is no computation;
* cold: the same, but each computation reads so much memory that it leaves nothing in the caches,
  as a layer's weights do;
* pair: two processes, on a core each, wait for one another.

The first two run in each process alone. Printed are the least and the median of blocks.

    python experiments/bench_tickets.py
    python experiments/bench_tickets.py --profile     # the first arm by function, too

Expect 15 us a ticket warm and 25 cold where nothing else runs; the least counts, the median shows
what else ran.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import pstats
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import FileStore

from interlace.comm.collectives import Gather, perform
from interlace.comm.communicator import Communicator
from interlace.comm.doorbell import DoorbellWaiter
from interlace.comm.driver import run_blocking
from interlace.comm.journal import Journal
from interlace.comm.path import Op, Path
from interlace.comm.plan import PlanConfig, PlanState, plan
from interlace.comm.post_order import PostOrder
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import WindowChannel
from interlace.comm.window_layout import DOORBELL_BYTES, GATHER, window_bytes
from interlace.comm.windows import native
from interlace.comm.workspace import Workspace
from interlace.rollout.config import Launch
from interlace.rollout.launch.deadlines import Deadlines
from interlace.rollout.launch.processes import ProcessTransport

ROLE = "tp"
STAGES = (
    *(
        f"{layer}.{purpose}"
        for layer in range(8)
        for purpose in ("rows", "heads", "dispatch", "combine")
    ),
    *(f"final.{purpose}" for purpose in ("rows", "experts", "logits")),
)
PATH = Path(
    name="decode",
    groups={ROLE: ((0, 1),)},
    program=tuple(Op(kind="Gather", role=ROLE, stage=stage) for stage in STAGES),
    whole=True,
    work=("decode",),
)
ROWS, WIDTH = 8, 512
CAPACITY = 1 << 16
BLOCK = 4
"""Forward passes in a block."""
SWEPT = bytes(8 << 20)
"""More than the second-level cache holds."""


class Rank:
    """All that a rank has between its forward pass and its communicator."""

    def __init__(
        self, transport: ProcessTransport, communicator: Communicator, posts: PostOrder
    ) -> None:
        self.transport = transport
        self.progress = Deadlines(transport.board.record, Launch())
        self.progress.expect((PATH,))
        self.state, self.config = PlanState(), PlanConfig(paths=(PATH,), mode="multiplexed")
        self.sequencer = Sequencer(
            rank=transport.rank,
            paths=(PATH,),
            communicators={(PATH.name, ROLE): communicator},
            around=transport.around,
            clock=transport.clock,
            journal=Journal(1000),
            progress=self.progress,
            posts=posts,
        )
        self.payload = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
        self._took_ns = 0

    def block(self, compute: Callable[[], object]) -> float:
        """Microseconds a ticket."""
        self._took_ns = 0
        for _ in range(BLOCK):
            self._step(compute)
        return self._took_ns / (BLOCK * len(STAGES)) / 1e3

    def _step(self, compute: Callable[[], object]) -> None:
        made = plan(self.state, [Proposal(rank=0, leader=True, decode_rows=ROWS)], self.config)
        self.state = made.after
        run_blocking(
            self.sequencer.walk(made, {PATH.name: self._forward(compute)}),
            park=time.sleep,
            waiter=self.transport.waiter,
            check=self.check,
            progress=self.progress,
            patience=self.progress.patience,
        )

    async def _forward(self, compute: Callable[[], object]) -> None:
        for stage in STAGES:
            compute()
            ended_at = time.perf_counter_ns()
            await perform(Gather(role=ROLE, stage=stage, payload=self.payload))
            self._took_ns += time.perf_counter_ns() - ended_at

    def check(self) -> None:
        if self.transport.board.is_poisoned():
            raise RuntimeError("the other rank has failed")


class Answered:
    """The other end of a window, which has posted before this rank does."""

    def __init__(self, transport: ProcessTransport) -> None:
        extension = native()
        if extension is None:
            raise SystemExit("the window's extension is not built: there is nothing to measure")
        memories = [bytearray(window_bytes(2, 2, CAPACITY)) for _ in range(2)]
        own, self._other = (
            extension.Window(memories, me, 2, CAPACITY, _crc(PATH.name), _crc(ROLE), [])
            for me in range(2)
        )
        posts = PostOrder(transport.rank)
        channel = WindowChannel(
            own,
            path=PATH.name,
            role=ROLE,
            members=(0, 1),
            rank=0,
            slots=2,
            capacity=CAPACITY,
            timeout_s=30.0,
            waiter=DoorbellWaiter(extension.Doorbell(bytearray(DOORBELL_BYTES)), spin_ns=0),
            clock=time.monotonic_ns,
            posts=posts,
        )
        workspace = Workspace(PATH.name, lambda size: torch.empty(size, dtype=torch.uint8))
        communicator = WindowCommunicator(channel, role=ROLE, workspace=workspace)
        self.rank = Rank(transport, communicator, posts)
        self._nth = 0
        self._crcs = [_crc(stage) for stage in STAGES]
        self._bytes = bytes(self.rank.payload.nbytes)
        self._counts = (len(self._bytes),) * 2

    def warm(self) -> None:
        """The other has posted."""
        nth = self._nth
        self._nth += 1
        stage = self._crcs[nth % len(STAGES)]
        self._other.post(nth % 2, nth, 0, nth, stage, GATHER, self._bytes, self._counts)

    def cold(self) -> None:
        """The other has posted, and the caches hold something else."""
        self.warm()
        SWEPT.find(b"1")


def measure(rank: int, store: str, blocks: int, profile: bool) -> dict[str, list[float]]:
    """Microseconds a ticket, of each arm and block."""
    found = FileStore(store, 2)
    with ProcessTransport(rank=rank, world=2, store=found, launch=Launch()) as transport:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        answered = Answered(transport)
        took = {
            "warm": [answered.rank.block(answered.warm) for _ in range(blocks)],
            "cold": [answered.rank.block(answered.cold) for _ in range(blocks)],
        }
        if profile and rank == 0:
            with cProfile.Profile() as profiler:
                for _ in range(blocks):
                    answered.rank.block(answered.warm)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        communicator = transport.communicator(PATH.name, ROLE, ((0, 1),), CAPACITY)
        pair = Rank(transport, communicator, transport.posts)
        took["pair"] = [pair.block(_nothing) for _ in range(blocks)]
    return took


def _nothing() -> None: ...


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60, help="of 4 forward passes")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        context = multiprocessing.get_context("spawn")
        args = 1, store, asked.blocks, False
        other = context.Process(target=measure, args=args, daemon=True)
        other.start()
        found = measure(0, store, asked.blocks, asked.profile)
        other.join()
    for arm, took in found.items():
        print(f"{arm}: {min(took):.1f} us a ticket, median {statistics.median(took):.1f}")


if __name__ == "__main__":
    main()
