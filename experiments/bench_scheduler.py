"""What does deciding cost, and what does a decode step spend on anything but its model?

First the scheduler alone, over forward passes that take no time: 32 turns run, a pool of blocks is
full of what earlier turns have left, so that every new block is an eviction, and turns of 640
tokens wait, eight for each prompt, all of them behind one template. One call is all decisions of a
step: what is proposed, committed and described, prefill in chunks of 512. Then the memory of one
that waits. Then real decode steps of 16 turns of the bfloat16 bench model, by one rank with no
transport at all. Process CPU time throughout.

Expect a call below 1 ms, the same for 1,000 and 10,000 that wait and for 10,000 and 100,000 blocks,
and less than 10 % of a decode step outside the model.

    python experiments/bench_scheduler.py [--out out/scheduler]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from interlace.comm.communicator import Communicator
from interlace.comm.driver import run_blocking
from interlace.comm.post_order import PostOrder
from interlace.comm.sequencer import Sequencer
from interlace.comm.waiter import RankWaiter, SleepWaiter
from interlace.moe.batch import Batch
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout import group
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.cache import model_folder
from interlace.rollout.config import RolloutConfig
from interlace.rollout.content import Content
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import compose
from interlace.rollout.launch.transport import AMPLE, Carrier, Groups
from interlace.rollout.messages import TurnRequest
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn
from interlace.rollout.verify.tag_cost import Alone

BLOCK = 64
RUNNING, CHUNK = 32, 512
CONTEXT, TEMPLATE, GENERATED = 640, 30, 48
TWINS = 8
LAYERS, TOP_K = 8, 4
WAITING, BLOCKS = (1_000, 10_000), (10_000, 100_000)
ROWS = 16
NUM_PARTS = len(WAITING) * len(BLOCKS) + 2
DRAWN = Drawn(token=7, logprob_raw=-1.0, logprob=-1.0, ends_choice=False)


# ---- the scheduler alone


class Prompts:
    """Contexts that begin with one template."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> list[int]:
        own = self._random.choices(range(1000, 9000), k=CONTEXT - TEMPLATE)
        return [*range(TEMPLATE), *own]


def request(trajectory: int, tokens: list[int], num: int = GENERATED) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=tokens,
        seed=0,
        experts_from=0,
        sampling=SamplingParams(max_tokens=num),
    )


def scheduler_over(num_blocks: int, prompts: Prompts) -> Scheduler:
    """A pool that is full of contexts nobody reads."""
    blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK)
    experts = np.zeros((CONTEXT, LAYERS, TOP_K), np.uint8)
    for _ in range(num_blocks * BLOCK // CONTEXT):
        tokens = prompts.next()
        lease = blocks.lease(tokens, CONTEXT)
        assert lease is not None
        blocks.copies_of(lease)
        blocks.give_back(lease, Content(tokens=tokens, experts=experts, weights=[0] * CONTEXT))
    return Scheduler(
        blocks=blocks,
        chunk_tokens=CHUNK,
        max_running=RUNNING,
        max_context=2048,
        expert_shape=(LAYERS, TOP_K),
        text_of=lambda _: "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Microseconds of process time."""

    decide: list[float]
    take: list[float]
    """To take in what the forward passes gave."""


def measure_calls(num_waiting: int, num_blocks: int, num_steps: int) -> Calls:
    prompts = Prompts(seed=num_blocks)
    scheduler = scheduler_over(num_blocks, prompts)
    submitted = 0
    calls = Calls(decide=[], take=[])
    for nth in range(num_steps + GENERATED):
        while len(scheduler._waiting) < num_waiting:
            tokens = prompts.next()
            for _ in range(TWINS):
                scheduler.submit(request(submitted, tokens))
                submitted += 1
        began = time.process_time()
        proposal = scheduler.propose(rank=0, hashes=())
        scheduler.commit()
        described = {"decode": scheduler.describe_decode()}
        if proposal.waiting_tokens:
            described["prefill"] = scheduler.describe_prefill()
        decided = time.process_time()
        for work, rows in described.items():
            experts = np.zeros((rows.num_rows, LAYERS, TOP_K), np.uint8)
            scheduler.take(work, [DRAWN] * len(rows.sample_rows), experts, 0)
        if nth >= GENERATED:  # before, not all places were taken
            calls.decide.append((decided - began) * 1e6)
            calls.take.append((time.process_time() - decided) * 1e6)
    return calls


def bytes_per_waiting(num: int = 2000) -> tuple[float, float]:
    """Of the request as it was received, and of what the scheduler adds to it."""
    prompts = Prompts(seed=3)
    scheduler = scheduler_over(100, prompts)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        requests = [request(nth, prompts.next()) for nth in range(num)]
        received = tracemalloc.get_traced_memory()[0]
        for one in requests:
            scheduler.submit(one)
        queued = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return (received - before) / num, (queued - received) / num


# ---- a decode step


class NoTransport:
    """Of one rank that is alone."""

    rank = 0
    device = torch.device("cpu")
    carrier = Carrier(kind="local", why="there is one rank")

    def __init__(self) -> None:
        self.waiter: RankWaiter = SleepWaiter()
        self.posts = PostOrder(0)

    def control(self, timeout_s: float) -> Communicator:
        return Alone()

    def group_control(self, groups: Groups, timeout_s: float, name: str = "group") -> Communicator:
        return Alone()

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        return Alone(path, role, self.posts)

    def around(self, path: str) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def clock(self) -> float:
        return time.monotonic()


@dataclass(slots=True, kw_only=True)
class Shares:
    """Milliseconds of steps, by what they were spent on."""

    of: dict[str, list[float]] = field(default_factory=dict)
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[name] += time.process_time() - began

        return timing

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time what a step calls."""
        watched = [
            (Sequencer, "_resume", "forward"),
            (Batch, "build", "batch"),
            (group, "sample", "sampling"),
        ]
        kept = [(place, name, getattr(place, name)) for place, name, _ in watched]
        for place, name, what in watched:
            setattr(place, name, self.timed(what, getattr(place, name)))
        try:
            yield
        finally:
            for place, name, work in kept:
                setattr(place, name, work)

    def step(self, step: Callable[[], object]) -> None:
        self.spent.clear()
        began = time.process_time()
        step()
        whole, spent = time.process_time() - began, self.spent
        shares = {
            "model": spent["forward"] - spent["batch"],
            "sampling": spent["sampling"],
            "batch as tensors": spent["batch"],
            "all else": whole - spent["forward"] - spent["sampling"],
            "step": whole,
        }
        for name, seconds in shares.items():
            self.of.setdefault(name, []).append(seconds * 1e3)


def measure_steps(rows: int, num_steps: int) -> dict[str, float]:
    """Medians of decode steps behind about 600 tokens."""
    name = "bench-qwen3-moe"
    config = RolloutConfig.model_validate({"model": {"path": name}, "launch": {"kind": "local"}})
    inbox, prompts, shares = Inbox(), Prompts(seed=5), Shares()
    transport = NoTransport()
    rank = compose(
        config, model_folder(name), transport, inbox, lambda event: None, num_blocks=16 * rows
    )
    for trajectory in range(rows):
        tokens = [token % 8192 for token in prompts.next()[:600]]
        inbox.put(request(trajectory, tokens, num=10_000))

    def step() -> None:
        run_blocking(rank.engine.step(), park=time.sleep)

    steps = rank.engine.journal.steps
    with shares.watching():
        while not steps or not any(name == "decode" for name, _ in steps[-1].rows):
            step()
        while dict(steps[-1].rows).get("decode") != rows:
            step()
        for _ in range(num_steps):
            shares.step(step)
            rank.engine.journal.tickets.clear()
    return {name: statistics.median(times) for name, times in shares.of.items()}


# ---- the page


def measure(steps: int, decode_steps: int, done: Callable[[], object]) -> dict[str, Any]:
    """All figures; `done` is called behind each of `NUM_PARTS` parts."""
    torch.set_num_threads(1)
    lines = []
    for num_waiting in WAITING:
        for num_blocks in BLOCKS:
            calls = measure_calls(num_waiting, num_blocks, steps)
            decide = sorted(calls.decide)
            lines.append(
                {
                    "waiting": num_waiting,
                    "blocks": num_blocks,
                    "decide_us": statistics.median(decide),
                    "decide_95_us": decide[int(0.95 * len(decide))],
                    "decide_most_us": decide[-1],
                    "take_in_us": statistics.median(calls.take),
                }
            )
            done()
    received, added = bytes_per_waiting()
    done()
    medians = measure_steps(ROWS, decode_steps)
    done()
    outside = medians["batch as tensors"] + medians["all else"]
    return {
        "calls": lines,
        "waiting_bytes": {"received": received, "added": added},
        "decode": {"rows": ROWS, "ms": medians, "outside": outside / medians["step"]},
        "load": os.getloadavg()[0],
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table("waiting", "blocks", "decide, median", "95 %", "most", "take in, median")
    for line in found["calls"]:
        values = (line[name] for name in list(line)[2:])
        table.add_row(
            f"{line['waiting']:,}", f"{line['blocks']:,}", *(f"{value:.0f} us" for value in values)
        )
    console.print(table)
    size = found["waiting_bytes"]
    console.print(
        f"a turn of {CONTEXT} tokens that waits: {size['received'] / 1e3:.1f} kB as it was "
        f"received, {size['added'] / 1e3:.1f} kB beside that"
    )
    decode = found["decode"]
    whole = decode["ms"]["step"]
    parts = ", ".join(
        f"{name} {ms:.2f} ms ({ms / whole:.1%})"
        for name, ms in decode["ms"].items()
        if name != "step"
    )
    console.print(f"decode step of {decode['rows']} rows: {whole:.1f} ms: {parts}")
    console.print(f"neither model nor sampling nor communication: {decode['outside']:.1%}")
    console.print(f"load {found['load']:.1f}")


def main(
    steps: int = typer.Option(300, min=10, help="Calls measured for each line."),
    decode_steps: int = typer.Option(60, min=5, help="Decode steps measured."),
    out: Annotated[Path | None, typer.Option(help="Folder for scheduler.json.")] = None,
) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("scheduler", total=NUM_PARTS)
        found = measure(steps, decode_steps, lambda: progress.advance(task))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=1)
        (out / "scheduler.json").write_text(text + "\n", encoding="utf-8")
    show(found, console)


if __name__ == "__main__":
    typer.run(main)
