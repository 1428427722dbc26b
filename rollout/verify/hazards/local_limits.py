"""Rows 12, 13 and 14: blocks, chunks and lengths that run out on one rank only."""

from __future__ import annotations

from .bare import BareRank, run_bare
from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .small_rollout import Size, SmallRank, run_small, same_collectives, turn


def gate_on_free_blocks() -> Outcome:
    """A local count of free blocks chooses between two collectives; it differs by one."""

    async def program(rank: BareRank) -> None:
        free_blocks = (5, 4)[rank.rank]
        if free_blocks >= 5:
            await rank.gather("attention", "all-reduce of a prefill")
        else:
            await rank.gather("ep", "all-gather of a decode step")

    return outcome_of(lambda: str(run_bare(program)))


def pools_that_differ_by_one() -> Outcome:
    """The same turns, of which one pool admits two at once and the other one."""

    def run() -> str:
        turns = {rank: [(0, turn(10 * rank + at, 8, 6)) for at in range(2)] for rank in (0, 1)}
        ranks = run_small(Size(num_blocks={0: 6, 1: 5}, chunk_tokens=16), turns)
        first = [dict(rank.engine.journal.steps[0].rows)["prefill"] for rank in ranks]
        if first[0] == first[1]:
            raise WrongDataError(f"rows of the first prefill: {first}; nothing differed")
        return f"first prefills of {first[0]} and {first[1]} rows; {same_collectives(ranks)}"

    return outcome_of(run)


def intermediate_chunk_returns() -> Outcome:
    """A chunk that does not end its prompt returns before the collectives of the drafts."""

    async def program(rank: BareRank) -> None:
        left = (8, 4)[rank.rank]
        await rank.gather("ep", "forward of a chunk of 4")
        left -= 4
        if left > 0:
            return
        for draft in range(2):
            await rank.gather("ep", f"draft {draft}")

    return outcome_of(lambda: str(run_bare(program)))


def chunks_of_one_program() -> Outcome:
    """A chunk that samples nothing has the collectives of one that does."""

    def run() -> str:
        ranks = run_small(Size(), {0: [(0, turn(1, 12, 2))], 1: [(0, turn(2, 4, 2))]})
        chunks = [_prefill_rows(rank) for rank in ranks]
        if chunks != [[4, 4, 4], [4, 0, 0]]:
            raise WrongDataError(f"chunks of {chunks} rows")
        return f"chunks of {chunks[0]} and {chunks[1]} rows; {same_collectives(ranks)}"

    return outcome_of(run)


def drafts_end_at_the_limit() -> Outcome:
    """The drafting loop of one rank stops at its sequence's length limit."""

    async def program(rank: BareRank) -> None:
        length, limit = (62, 40)[rank.rank], 64
        for draft in range(4):
            if length + draft >= limit:
                break
            await rank.gather("ep", f"draft {draft}")
        await rank.gather("tp", "verification of the drafts")

    return outcome_of(lambda: str(run_bare(program)))


def context_ends_on_one_rank() -> Outcome:
    """One rank's turn runs into the end of the context, the other's goes on."""

    def run() -> str:
        size = Size(max_context=16)
        ranks = run_small(size, {0: [(0, turn(1, 13, 20))], 1: [(0, turn(2, 4, 11))]})
        lengths = [len(result.token_ids) for rank in ranks for result in rank.results.values()]
        if lengths != [3, 11]:
            raise WrongDataError(f"{lengths} tokens were sampled")
        return f"ended after {lengths[0]} and {lengths[1]} tokens; {same_collectives(ranks)}"

    return outcome_of(run)


def _prefill_rows(rank: SmallRank) -> list[int]:
    steps = rank.engine.journal.steps
    return [num for step in steps for name, num in step.rows if name == "prefill"]


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=12,
        url="https://github.com/NVIDIA/TensorRT-LLM/pull/14020",
        title="a gate on the rank's own free blocks",
        how="in process",
        expected="hang",
        unsafe=gate_on_free_blocks,
        ours=pools_that_differ_by_one,
    ),
    Hazard(
        row=13,
        url="https://github.com/RBLN-SW/vllm-rbln/pull/792",
        title="an intermediate chunk skips the drafts' collectives",
        how="in process",
        expected="hang",
        unsafe=intermediate_chunk_returns,
        ours=chunks_of_one_program,
    ),
    Hazard(
        row=14,
        url="https://github.com/vllm-project/vllm/pull/44954",
        title="drafting stops at the length limit on one rank",
        how="in process",
        expected="hang",
        unsafe=drafts_end_at_the_limit,
        ours=context_ends_on_one_rank,
    ),
)
