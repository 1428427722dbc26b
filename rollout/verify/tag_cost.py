"""What verification costs a step: both ways in one run, step by step in turn.

Levels L0 (the executor's checks) and L1 (hashes of tickets and plans, compared in the exchange)
are run and left out on the same decode steps of a small model; a subclass that lives here leaves
them out. L2, the window's header check, is a few comparisons inside the call that copies a result,
and cannot be left out; the whole call is counted for it, which is more than it costs.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch

from interlace.comm import window_layout as at
from interlace.comm.agreement import check_hashes
from interlace.comm.collectives import Collective, Gather
from interlace.comm.driver import run_blocking
from interlace.comm.journal import Journal
from interlace.comm.path import Path, Ticket
from interlace.comm.plan import PlanConfig, PlanState, StepPlan, plan
from interlace.comm.post_order import PostOrder
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer, record_program
from interlace.comm.windows import native
from interlace.moe.config import read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache, attention_planes
from interlace.moe.model import Model
from interlace.moe.placement import Placement
from interlace.moe.program import stub_result
from interlace.moe.random_model import write_random_model
from interlace.moe.weights import load_weights

LIMIT = 0.03
"""The share of a step that verification may cost."""

ROWS = 8
_CONTEXT = 96
_SIZES: dict[str, int | str] = {
    "num_layers": 8,
    "hidden_size": 512,
    "expert_size": 256,
    "num_experts": 16,
    "top_k": 4,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCost:
    """CPU seconds of one rank; medians over pairs of steps."""

    step_s: float
    """A decode step without verification."""
    tags_s: float
    """What L0 and L1 add to it."""
    headers_s: float
    """Upper bound of what L2 adds; 0 where the window's extension is not built."""
    num_tickets: int
    num_pairs: int

    @property
    def share(self) -> float:
        """Of a verified step."""
        added = self.tags_s + self.headers_s
        return added / (self.step_s + added)


class _Unverified(Sequencer):
    """Posts whatever a forward pass asks for."""

    def _admit(self, ticket: Ticket) -> None: ...

    def _match(self, ticket: Ticket, request: Collective | None) -> Collective:
        assert request is not None
        return request

    def _note(self, *tickets: Ticket) -> None: ...

    def _note_plan(self, plan: StepPlan) -> None: ...


class Alone:
    """A group of one rank over no transport at all: what is left is the step's own time."""

    timeout_s = 1.0

    def __init__(self, path: str = "", role: str = "", posts: PostOrder | None = None) -> None:
        self._path, self._role, self._posts = path, role, posts

    def post(self, request: Collective, ticket: Ticket | None) -> Collective:
        if ticket is not None and self._posts is not None:
            self._posts.admit(self._path, self._role, request, ticket)
        return request

    def poll(self, handle: Collective) -> bool:
        return True

    def result(self, handle: Collective) -> Any:
        return [handle.payload] if isinstance(handle, Gather) else handle.payload

    def abort(self) -> None: ...


def measure(num_pairs: int = 60) -> TagCost:
    """Decode steps of 8 sequences in a random Qwen3-MoE of 8 layers, verified and not, in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="interlace-tags-") as folder:
            write_random_model(FilePath(folder), "qwen3_moe", 0, **_SIZES)
            step, num_tickets = _steps(FilePath(folder))
        for verified in (True, False) * 3:
            step(verified)
        bare, added = [], []
        for nth in range(num_pairs):
            first = nth % 2 == 0
            took = {verified: step(verified) for verified in (first, not first)}
            bare.append(took[False])
            added.append(took[True] - took[False])
    finally:
        torch.set_num_threads(threads)
    return TagCost(
        step_s=statistics.median(bare),
        tags_s=max(0.0, statistics.median(added)),
        headers_s=num_tickets * _take_s(),
        num_tickets=num_tickets,
        num_pairs=num_pairs,
    )


def _steps(folder: FilePath) -> tuple[Callable[[bool], float], int]:
    """A step that says how long it took, and its number of tickets."""
    config = read_config(folder)
    blocks_each = -(-(_CONTEXT + 1) // BLOCK_SIZE)
    kv = KVCache(
        num_layers=config.num_layers,
        num_blocks=ROWS * blocks_each,
        planes=attention_planes(config),
        dtype=torch.bfloat16,
    )
    placement = Placement.contiguous(config.num_experts, 1)
    context = PathContext(path="decode", kv=kv, expert_placement=placement)
    weights = load_weights(
        folder, config, expert_ids=range(config.num_experts), dtype=torch.bfloat16
    )
    model = Model(config)
    batch = Description(
        input_ids=tuple(range(3, 3 + ROWS)),
        positions=(_CONTEXT,) * ROWS,
        cu_seqlens_q=tuple(range(ROWS + 1)),
        block_tables=tuple(
            tuple(range(row * blocks_each, (row + 1) * blocks_each)) for row in range(ROWS)
        ),
        sample_rows=tuple(range(ROWS)),
    )
    with torch.inference_mode():
        program = record_program(
            model.forward(weights, context, Description()), {"ep": 1}, stub_result
        )
    path = Path(
        name="decode", groups={"ep": ((0,),)}, program=program, whole=True, work=("decode",)
    )
    plans = PlanConfig(paths=(path,), mode="multiplexed")
    kinds = {True: Sequencer, False: _Unverified}
    sequencers = {verified: _sequencer(kind, path) for verified, kind in kinds.items()}
    states = dict.fromkeys(kinds, PlanState())

    def step(verified: bool) -> float:
        sequencer = sequencers[verified]
        brought = [Proposal(rank=0, leader=True, decode_rows=ROWS, hashes=sequencer.hashes)]
        made = plan(states[verified], brought, plans)
        began_at = time.process_time()
        if verified:
            check_hashes(brought, sequencer.keys, sequencer.paths, "tag cost")
        forward = model.forward(weights, context, batch, max_rows=ROWS)
        run_blocking(sequencer.walk(made, {"decode": forward}), park=time.sleep)
        took = time.process_time() - began_at
        states[verified] = made.after
        sequencer.journal.tickets.clear()
        return took

    return step, len(program)


def _sequencer(kind: type[Sequencer], path: Path) -> Sequencer:
    def around(name: str) -> AbstractContextManager[None]:
        return torch.inference_mode()

    posts = None if kind is _Unverified else PostOrder(0)
    return kind(
        rank=0,
        paths=(path,),
        communicators={(path.name, role): Alone(path.name, role, posts) for role in path.groups},
        around=around,
        clock=itertools.count().__next__,
        journal=Journal(),
        posts=posts,
    )


def _take_s(num: int = 2000) -> float:
    """Seconds to take an empty message out of the window, the check of its header included."""
    extension = native()
    if extension is None:
        return 0.0
    memory = bytearray(at.window_bytes(1, 2, 64))
    window = extension.Window([memory], 0, 2, 64, 1, 2, [])
    out, took = bytearray(64), []
    for nth in range(num):
        posted = nth % 2, nth, 0, nth, 3, at.GATHER
        window.post(*posted, out, (0,))
        began_at = time.perf_counter()
        window.take(*posted, (0,), out)
        took.append(time.perf_counter() - began_at)
    window.close()
    return statistics.median(took)
