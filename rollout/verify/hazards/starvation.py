"""Rows 44 to 46 of the catalogue: who waits too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from interlace.comm.plan import Mode, PlanConfig, PlanState, StepPlan, plan
from interlace.comm.proposal import Proposal
from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.messages import TurnRequest
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn

from .hazard import Hazard, Outcome, StarvationError, outcome_of
from .stamped import BUSY, two_paths

NUM_LAYERS = 12


def _plans(mode: Mode, num_steps: int) -> tuple[PlanConfig, list[StepPlan]]:
    """Two ranks that always decode and always have more to prefill."""
    config = PlanConfig(paths=two_paths(num_layers=NUM_LAYERS), mode=mode)
    state, plans = PlanState(), []
    proposals = [Proposal(rank=rank, leader=True, **BUSY) for rank in range(2)]
    for _ in range(num_steps):
        plans.append(plan(state, proposals, config))
        state = plans[-1].after
    return config, plans


def _longest_wait(plans: Sequence[StepPlan], path: str) -> int:
    """Tickets of other paths between two of this path, at most; from the start and to the end."""
    longest = waited = 0
    for ticket in (ticket for step in plans for ticket in step.tickets):
        waited = 0 if ticket.path == path else waited + 1
        longest = max(longest, waited)
    return longest


def prefill_first() -> Outcome:
    """The mode `serial`: decode waits as long as a prefill runs or could start."""

    def run() -> str:
        config, plans = _plans("serial", 100)
        bound = math.ceil(NUM_LAYERS / config.chunk_steps)
        wait = _longest_wait(plans, "decode")
        if wait > bound:
            raise StarvationError(f"decode waits for {wait} prefill collectives, and for ever")
        return f"decode waits for at most {wait}"

    return outcome_of(run)


def bounded_bypass() -> Outcome:
    """Decode waits for no more prefill collectives than one step's share, and prefill moves on in
    every step."""

    def run() -> str:
        config, plans = _plans("multiplexed", 100)
        bound = math.ceil(NUM_LAYERS / config.chunk_steps)
        wait = _longest_wait(plans, "decode")
        if wait > bound:
            raise StarvationError(f"decode waits for {wait} prefill collectives, {bound} allowed")
        if not all(step.count("prefill") for step in plans):
            raise StarvationError("a step without prefill")
        return (
            f"100 steps: at most {wait} prefill collectives ({bound} allowed) between two of "
            "decode, prefill in every step"
        )

    return outcome_of(run)


class ChunkedRank:
    """Prompts of `num_chunks` chunks, one after another; behind each, one turn without any."""

    def __init__(self, num_chunks: int, first: int) -> None:
        self.num_chunks, self.left, self.num_done = num_chunks, first, 0

    def turn(self, prefills: bool) -> None:
        """One step of the whole group; the rank takes part if it has a chunk."""
        if self.left == 0:
            self.left = self.num_chunks
        elif prefills:
            self.left -= 1
            self.num_done += 1


Decide = Callable[[int, Sequence[ChunkedRank]], bool]
"""(steps since the last prefill, ranks) -> whether this step prefills."""


def _throughput(decide: Decide, firsts: Sequence[int], num_steps: int = 400) -> float:
    """Chunks a step and rank."""
    ranks = [ChunkedRank(4, first) for first in firsts]
    since = 0
    for _ in range(num_steps):
        prefills = decide(since, ranks)
        since = 0 if prefills else since + 1
        for rank in ranks:
            rank.turn(prefills)
    return sum(rank.num_done for rank in ranks) / num_steps / len(ranks)


IN_PHASE, OUT_OF_PHASE = (4, 4, 4, 4), (1, 2, 3, 4)


def _phases(decide: Decide) -> str:
    """StarvationError if ranks that are out of phase do much less than those in phase."""
    together, apart = _throughput(decide, IN_PHASE), _throughput(decide, OUT_OF_PHASE)
    told = f"{together:.2f} chunks a step in phase, {apart:.2f} out of phase"
    if apart < 0.9 * together:
        raise StarvationError(told)
    return told


def delayed_until_all_can() -> Outcome:
    """Prefill waits, for up to three steps, until every rank has some: once ranks differ by a
    chunk, each of them makes all others wait in its turn, and they never meet again."""

    def decide(since: int, ranks: Sequence[ChunkedRank]) -> bool:
        able = [rank.left > 0 for rank in ranks]
        return all(able) or (any(able) and since >= 3)

    return outcome_of(lambda: _phases(decide))


def one_cursor_for_all() -> Outcome:
    """The plan starts a chunk for all ranks as soon as one is ripe on any; who has none rides
    along empty."""
    config = PlanConfig(paths=two_paths(), mode="multiplexed")

    def decide(since: int, ranks: Sequence[ChunkedRank]) -> bool:
        proposals = [
            Proposal(rank=nth, leader=True, waiting_tokens=rank.left, idle=False)
            for nth, rank in enumerate(ranks)
        ]
        return "prefill" in plan(PlanState(), proposals, config).finish

    return outcome_of(lambda: _phases(decide))


def _full_pool() -> Scheduler:
    """One sequence runs and holds most blocks; another waits for more than are left."""
    scheduler = Scheduler(
        blocks=BlockManager(num_blocks=6, block_size=4),
        chunk_tokens=16,
        max_running=4,
        max_context=24,
        expert_shape=(1, 1),
        text_of=lambda _: "",
    )
    for trajectory in range(2):
        request = TurnRequest(
            trajectory=trajectory,
            turn=0,
            token_ids=[10 * trajectory + at for at in range(14)],
            seed=0,
            experts_from=0,
            sampling=SamplingParams(max_tokens=4),
        )
        scheduler.submit(request)
    return scheduler


def _run(scheduler: Scheduler, work: str) -> int:
    """One forward pass of the scheduler; how many rows it had."""
    decode = work == "decode"
    rows: Description = scheduler.describe_decode() if decode else scheduler.describe_prefill()
    drawn = [Drawn(token=1, logprob_raw=0.0, logprob=0.0, ends_choice=False)]
    experts = np.zeros((rows.num_rows, 1, 1), np.uint8)
    scheduler.take(work, drawn * len(rows.sample_rows), experts, 0)
    scheduler.commit()
    return rows.num_rows


def forced_without_a_token() -> Outcome:
    """Whoever waits forces a prefill; it gets no blocks, and those who hold them never decode."""
    scheduler = _full_pool()
    _run(scheduler, "prefill")
    rows = [_run(scheduler, "prefill") for _ in range(50)]
    idle = next((at for at, num in enumerate(rows) if num == 0), None)
    if idle is None or any(rows[idle:]):
        return Outcome(kind="right", evidence=f"rows by step: {rows}")
    return Outcome(
        kind="livelock", evidence=f"{len(rows) - idle} steps in a row prefill 0 tokens, all forced"
    )


def only_what_fits_is_proposed() -> Outcome:
    """A rank proposes the tokens it can place now; without any, decode goes on and frees blocks."""

    def run() -> str:
        scheduler, state = _full_pool(), PlanState()
        config = PlanConfig(paths=two_paths(), mode="serial")  # prefill first, as in the bug
        empty = ended = 0
        for _ in range(50):
            proposal = scheduler.propose(rank=0, hashes=())
            if proposal.idle:
                ended = 1
                break
            step = plan(state, [proposal], config)
            state = step.after
            empty += sum(_run(scheduler, work) == 0 for work in step.finish)
        if empty or not ended:
            raise StarvationError(f"{empty} forward passes without a row, ended: {bool(ended)}")
        return f"both sequences end after {state.step} steps, no forward pass without a row"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=44,
        url="https://github.com/sgl-project/sglang/issues/32549",
        title="prefill always goes first, and decode gets one batch in a while",
        how="unit",
        expected="starvation",
        unsafe=prefill_first,
        ours=bounded_bypass,
    ),
    Hazard(
        row=45,
        url="https://github.com/sgl-project/sglang/issues/35241",
        title="data-parallel ranks get out of phase by whole chunks and hold each other up",
        how="unit",
        expected="starvation",
        unsafe=delayed_until_all_can,
        ours=one_cursor_for_all,
    ),
    Hazard(
        row=46,
        url="https://github.com/tenstorrent/vllm/pull/472",
        title="a forced prefill schedules no token, again and again",
        how="unit",
        expected="livelock",
        unsafe=forced_without_a_token,
        ours=only_what_fits_is_proposed,
    ),
)
