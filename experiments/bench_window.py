"""How much faster are small messages between ranks of one host over the window than over gloo?

Both arms in one run of two processes, each on a core of its own, in turn, many short rounds;
medians, so that what else the machine does shows in the quartiles and not in the result. Two
levels: the bare call (the C++ window against an asynchronous collective of torch.distributed, on
raw bytes), and the whole communicator as a rank uses it, from the post to the result under the
blocking driver.

Expect a tenth of gloo's time or less at up to 16 KB at both levels, on two cores that are free.
The physical limit, printed beside, is a copy in and a copy out on one core.

    python experiments/bench_window.py --out out/bench-window
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from interlace.comm.collectives import Collective, Exchange, Finish, perform
from interlace.comm.communicator import Communicator
from interlace.comm.driver import run_blocking
from interlace.comm.torch_communicator import TorchCommunicator
from interlace.comm.waiter import SleepWaiter, Waiter
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import WindowChannel
from interlace.comm.window_layout import EXCHANGE
from interlace.comm.windows import Windows, meet, native
from interlace.comm.workspace import Workspace

SIZES = (1 << 10, 4 << 10, 16 << 10, 256 << 10)
"""Bytes a rank sends, half of them to the other."""
CAPACITY = 1 << 20
CALLS = 50
"""One arm's turn."""


class Rank:
    """One of two processes, with every arm ready."""

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        extension = native()
        if extension is None:
            raise SystemExit("the window's extension is not built: there is nothing to measure")
        met = meet(rank, self.tell, extension=True)
        windows = Windows(rank, self.tell, met, extension)
        self.bell = windows.waiter
        self.bare, window = (
            windows.make("p", role, [(0, 1)], slots=2, capacity=CAPACITY) for role in ("bare", "ep")
        )
        channel = WindowChannel(
            window,
            path="p",
            role="ep",
            members=(0, 1),
            rank=rank,
            slots=2,
            capacity=CAPACITY,
            timeout_s=30.0,
            waiter=windows.waiter,
            clock=time.monotonic_ns,
        )
        self.group = dist.new_group([0, 1])
        self.arms: dict[str, tuple[Communicator, Waiter]] = {
            "window": (
                WindowCommunicator(channel, role="ep", workspace=_workspace()),
                windows.waiter,
            ),
            "gloo": (
                TorchCommunicator(
                    self.group, role="ep", workspace=_workspace(), slots=2, timeout_s=30.0
                ),
                SleepWaiter(),
            ),
        }
        self.posted = 0
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})

    def tell(self, text: str) -> list[str]:
        everybody: list[Any] = ["", ""]
        dist.all_gather_object(everybody, text)
        return everybody

    def bare_window(self, num_bytes: int) -> Callable[[], None]:
        sent, received = bytearray(num_bytes), bytearray(num_bytes)
        counts = (num_bytes // 2, num_bytes // 2)

        def call() -> None:
            nth = self.posted
            self.posted += 1
            message = (nth % 2, nth, 0, nth, 7, EXCHANGE)
            self.bare.post(*message, sent, counts)
            while True:
                self.bell.arm()
                if self.bare.poll(nth % 2, nth) == 0:
                    break
                self.bell.wait(0.05)
            if self.bare.take(*message, counts, received) is not None:
                raise RuntimeError(f"message {nth} is not what was sent")

        return call

    def bare_gloo(self, num_bytes: int) -> Callable[[], None]:
        sent = torch.zeros(num_bytes, dtype=torch.uint8)
        received = torch.zeros(num_bytes, dtype=torch.uint8)

        def call() -> None:
            dist.all_to_all_single(received, sent, group=self.group, async_op=True).wait()

        return call

    def whole(self, arm: str, num_bytes: int) -> Callable[[], None]:
        communicator, waiter = self.arms[arm]
        payload = torch.zeros(2, num_bytes // 8)
        request = Exchange(role="ep", stage="x", payload=payload, send=(1, 1), recv=(1, 1))

        def call() -> None:
            run_blocking(_ask(communicator, request), park=time.sleep, waiter=waiter)

        return call


def _workspace() -> Workspace[torch.Tensor]:
    return Workspace("p", lambda size: torch.empty(size, dtype=torch.uint8))


async def _ask(communicator: Communicator, request: Collective) -> Any:
    handle = communicator.post(request, None)
    return await perform(Finish(communicator=communicator, handle=handle, where="the bench"))


def timed(call: Callable[[], None]) -> tuple[list[float], float]:
    """Microseconds of each of `CALLS` calls, and of the processor per call."""
    took, used = [], time.process_time()
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return took, (time.process_time() - used) / CALLS * 1e6


def copied(num_bytes: int) -> float:
    """Microseconds of the copies a message takes: into a slot, and out of one."""
    source, slot = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
    took = []
    for _ in range(CALLS * 4):
        began = time.perf_counter()
        slot[:] = source
        source[:] = slot
        took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def measure(rank: Rank, rounds: int) -> list[dict[str, Any]]:
    """A row for each level and size; both arms in turn within every round."""
    rows = []
    for level in ("bare call", "communicator"):
        for size in SIZES:
            if level == "bare call":
                calls = {"window": rank.bare_window(size), "gloo": rank.bare_gloo(size)}
            else:
                calls = {arm: rank.whole(arm, size) for arm in ("window", "gloo")}
            took: dict[str, list[float]] = {arm: [] for arm in calls}
            used: dict[str, list[float]] = {arm: [] for arm in calls}
            for nth in range(rounds + 1):
                for arm, call in calls.items():
                    rank.tell("ready")
                    times, processor = timed(call)
                    if nth:  # the first round warms up
                        took[arm] += times
                        used[arm].append(processor)
            medians = {arm: statistics.median(times) for arm, times in took.items()}
            row: dict[str, Any] = {"level": level, "bytes": size, "copies_us": copied(size)}
            for arm in calls:
                low, _, high = statistics.quantiles(took[arm], n=4)
                row[arm] = {
                    "median_us": medians[arm],
                    "quartiles_us": [low, high],
                    "cpu_us": statistics.median(used[arm]),
                }
            row["gloo_over_window"] = medians["gloo"] / medians["window"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="an exchange between two processes, microseconds: median (quartiles)")
    for name in ("level", "bytes", "window", "gloo", "gloo/window", "two copies", "cpu w/g"):
        made.add_column(name, justify="right")
    for row in rows:
        arms = [
            f"{row[arm]['median_us']:.1f} ({row[arm]['quartiles_us'][0]:.1f}-"
            f"{row[arm]['quartiles_us'][1]:.1f})"
            for arm in ("window", "gloo")
        ]
        made.add_row(
            row["level"],
            f"{row['bytes']:,}",
            *arms,
            f"{row['gloo_over_window']:.1f}",
            f"{row['copies_us']:.1f}",
            f"{row['window']['cpu_us']:.0f} / {row['gloo']['cpu_us']:.0f}",
        )
    return made


def _other(store: str, rounds: int) -> None:
    measure(Rank(1, store), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-window"))
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_other, args=(store, asked.rounds), daemon=True)
        other.start()
        rows = measure(Rank(0, store), asked.rounds)
        other.join()
    Console(width=120).print(table(rows))
    (asked.out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
