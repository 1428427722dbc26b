"""One of the ranks whose steps are taken apart: a process with an engine and no environments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from interlace.comm.driver import run_blocking
from interlace.comm.journal import StepRecord
from interlace.moe import kernels
from interlace.moe.config import read_config
from interlace.moe.linear import Linear, keep_to_row_stable_kernels
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.config_file import load_config
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import blocks_for, compose
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.messages import TurnRequest

from .parts import Work, watched
from .reading import read_bytes_per_s
from .stopwatch import Stopwatch

EDGE = 3
"""Steps at the beginning and at the end of a shape that are left out."""
COUNTED = 4
"""Of the others each such one is counted and not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Steps of one kind, on every rank alike."""

    path: str
    rows: int
    context: int
    """Prompt tokens of each row of decode; of prefill, as many as there are rows."""
    steps: int

    @property
    def name(self) -> str:
        return f"{self.path} {self.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What one shape took on one rank: an item for each step."""

    parts: list[dict[str, float]]
    """CPU seconds."""
    waited_s: list[float]
    work: list[dict[str, dict[str, float]]]
    """FLOPs and bytes by part of the steps that were counted instead."""


def ceilings(drive: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """FLOP/s and bytes/s that one rank reaches while the others do the same."""
    size, flops = 1024, {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size).to(dtype)
        flops[f"torch {str(dtype).removeprefix('torch.')}"] = (
            2
            * size**3
            / drive(
                lambda a=a: a @ a  # type: ignore[misc]
            )
        )
    if kernels.instructions():
        own, x = Linear(torch.randn(size, size).bfloat16()), torch.randn(size, size).bfloat16()
        flops["own bfloat16"] = 2 * size**3 / drive(lambda: own(x))
    return {**flops, "bytes": read_bytes_per_s(drive)}


def least_seconds(work: Callable[[], Any], tries: int = 5) -> float:
    """CPU time of one call."""
    best = float("inf")
    for _ in range(tries):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def run_rank(
    rank: int, world: int, store: str, model: str, instructions: str, shapes: Sequence[Shape]
) -> dict[str, Any]:
    """Steps of all shapes, by name, and the ceilings; `instructions` as in ``model.kernels``."""
    torch.set_num_threads(1)
    kernels.choose(instructions)
    torch.manual_seed(0)
    keep_to_row_stable_kernels()
    with torch.inference_mode():
        found: dict[str, Any] = {"ceilings": ceilings(least_seconds)}
    config = load_config(
        overrides=[
            f"model.path={model}",
            f"model.kernels={instructions}",
            f"layout.world={world}",
            "launch.kind=torchrun",
            "scheduler.chunk_tokens=512",
            "scheduler.num_blocks=512",
        ]
    )
    file_store = FileStore(store, world)
    with ProcessTransport(
        rank=rank, world=world, store=file_store, launch=config.launch
    ) as transport:
        profile = _Profile(config, Path(model), transport)
        found["carrier"] = transport.carrier.kind
        found["switch_us"] = profile.watch.switch_s * 1e6
        found["shapes"] = {shape.name: profile.of(shape) for shape in shapes}
    return found


class _Profile:
    def __init__(self, config: Any, folder: Path, transport: ProcessTransport) -> None:
        self._transport, self._inbox, self._rank = transport, Inbox(), transport.rank
        model_config = read_config(folder)
        self._vocab_size = model_config.vocab_size
        self._num_texts = self._num_asked = 0
        self.watch, self._work = Stopwatch(), Work(model_config)
        num_blocks = blocks_for(config, folder, transport.device)
        rank = compose(
            config, folder, transport, self._inbox, lambda event: None, num_blocks=num_blocks
        )
        self._engine = rank.engine
        if rank.first_use is not None:
            self._drive(rank.first_use())

    def of(self, shape: Shape) -> Steps:
        """Every rank calls this with the same shapes in the same order, between parked steps.

        What decodes finds its prompt in the cache: prefilling it takes steps, and the first rows
        would end before the last begin.
        """
        steps = Steps(parts=[], waited_s=[], work=[])
        decodes = shape.path == "decode"
        texts = [self._text(shape.context) for _ in range(shape.rows if decodes else shape.steps)]
        with watched(self.watch, self._work):
            if decodes:
                self._ask(texts, 1)
            self._until_parked(lambda: None)
            for together in [texts] if decodes else [[text] for text in texts]:
                self._ask(together, shape.steps + 1 if decodes else 1)
                self._until_parked(lambda: self._note(shape, steps))
        if decodes:
            for each in (steps.parts, steps.waited_s, steps.work):
                del each[:EDGE], each[-EDGE:]
        timed = [at for at, work in enumerate(steps.work) if not work]
        return Steps(
            parts=[steps.parts[at] for at in timed],
            waited_s=[steps.waited_s[at] for at in timed],
            work=[work for work in steps.work if work],
        )

    def _note(self, shape: Shape, steps: Steps) -> None:
        """The step that has just ended, if it is of this shape and of no other."""
        parts, waited_s = self.watch.take()
        counted = self._work.take() if self._work.on else {}
        record = self._engine.journal.steps[-1]
        if _is_of(record, shape):
            steps.parts.append(parts)
            steps.waited_s.append(waited_s)
            steps.work.append(counted)
            self._work.on = len(steps.work) % COUNTED == COUNTED - 1

    def _until_parked(self, after_each: Callable[[], None]) -> None:
        """Step until all ranks had nothing to do: they agree on it, so all stop behind one step."""
        self.watch.take()
        while True:
            self._drive(self._engine.step())
            after_each()
            if self._engine.journal.steps[-1].parked_ms:
                return

    def _text(self, num_tokens: int) -> list[int]:
        self._num_texts += 1
        text = np.random.default_rng((self._rank, self._num_texts))
        return [int(token) for token in text.integers(3, self._vocab_size, num_tokens)]

    def _ask(self, texts: Sequence[list[int]], generate: int) -> None:
        for text in texts:
            self._num_asked += 1
            self._inbox.put(
                TurnRequest(
                    trajectory=self._num_asked,
                    turn=0,
                    token_ids=text,
                    seed=0,
                    experts_from=0,
                    sampling=SamplingParams(max_tokens=generate),
                )
            )

    def _drive(self, work: Any) -> Any:
        return run_blocking(work, park=time.sleep, waiter=self._transport.waiter)


def _is_of(record: StepRecord, shape: Shape) -> bool:
    rows = {path: num for path, num in record.rows if num}
    tickets = {path for path, num in record.num_tickets if num}
    return rows == {shape.path: shape.rows} and tickets == {shape.path}
