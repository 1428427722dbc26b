"""Rows 5, 8, 9 and 10: what a rank sees for itself decides which collective comes next."""

from __future__ import annotations

from interlace.comm.collectives import Collective
from interlace.comm.errors import OrderError
from interlace.moe.description import Description
from interlace.rollout.messages import Abort

from .bare import BareRank, run_bare
from .faulty_model import FaultyModel
from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .small_rollout import Script, Size, run_small, same_collectives, turn

PAIR = Size()


def graph_by_local_tokens() -> Outcome:
    """Up to 8 tokens a captured graph runs, beyond it the eager layer with its counts."""

    async def program(rank: BareRank) -> None:
        num_tokens = (3, 20)[rank.rank]
        if num_tokens > 8:
            await rank.gather("ep", "counts, eager")
        mode = "graph" if num_tokens <= 8 else "eager"
        await rank.gather("ep", f"dispatch, {mode}")
        await rank.gather("ep", f"combine, {mode}")

    return outcome_of(lambda: str(run_bare(program)))


def bucket_by_agreed_rows() -> Outcome:
    """The size a forward pass may choose a graph by comes from the plan, not from its own rows."""

    def run() -> str:
        turns = [(0, turn(at, 2, 8)) for at in range(5)]
        ranks = run_small(PAIR, {0: turns, 1: [(0, turn(9, 2, 8))]})
        told = [rank.model.max_rows for rank in ranks]
        rows = [
            [num for step in rank.engine.journal.steps for _, num in step.rows] for rank in ranks
        ]
        if told[0] != told[1] or rows[0] == rows[1]:
            raise WrongDataError(f"ranks were told {told} and had {rows} rows")
        at = max(range(len(told[0])), key=lambda index: min(rows[0][index], 3 * rows[1][index]))
        return (
            f"with {rows[0][at]} and {rows[1][at]} rows both were told {told[0][at]}; "
            f"{same_collectives(ranks)}"
        )

    return outcome_of(run)


def aborts_by_own_clock() -> Outcome:
    """Each rank of a tensor-parallel pair drops overdue requests by its own clock."""

    async def program(rank: BareRank) -> None:
        now, deadlines = (9.8, 10.1)[rank.rank], [10.0]
        for step in range(4):
            batch = [deadline for deadline in deadlines if now < deadline]
            if batch:
                await rank.gather("tp", f"partial sums of step {step}", [1] * len(batch))
            await rank.gather("requests", f"request broadcast behind step {step}")
            now += 0.1

    return outcome_of(lambda: str(run_bare(program)))


def only_the_leader_aborts() -> Outcome:
    """Only the leader of a group aborts; the others run what it describes."""

    def run() -> str:
        square = Size(world=4, tp=2)
        script: Script = {
            0: [(0, turn(1, 9, 9)), (0, turn(2, 5, 9)), (3, Abort(trajectory=1))],
            2: [(0, turn(3, 4, 9)), (4, Abort(trajectory=3))],
        }
        ranks = run_small(square, script)
        ends = {n: result.finish for rank in ranks for n, result in rank.results.items()}
        if ends != {1: "aborted", 2: "length", 3: "aborted"}:
            raise WrongDataError(f"turns ended {ends}")
        pairs = [same_collectives(ranks[at : at + 2]) for at in (0, 2)]
        return f"aborts in steps 3 and 4, followers know no clock; pairs: {'; '.join(pairs)}"

    return outcome_of(run)


def one_rank_leaves_the_loop() -> Outcome:
    """What the verification of drafts found on one rank sends it to another collective."""

    async def program(rank: BareRank) -> None:
        accepted = rank.rank == 0
        await rank.gather("tp", "layers")
        if accepted:
            await rank.gather("tp", "logits")
        await rank.gather("requests", "request broadcast")

    return outcome_of(lambda: str(run_bare(program)))


def leaving_is_refused_by_name() -> Outcome:
    """Wherever a forward pass leaves, the error names rank, step, path, stage and what was last."""

    def leaves_at(place: int) -> type[FaultyModel]:
        class Leaves(FaultyModel):
            def fault(
                self, nth: int, request: Collective, description: Description
            ) -> Collective | None:
                return None if nth == place else request

        return Leaves

    def run() -> str:
        script = {0: [(0, turn(1, 5, 4))], 1: [(0, turn(2, 3, 4))]}
        found = []
        for place in range(6):
            try:
                run_small(PAIR, script, seed=place, models={1: leaves_at(place)})
            except OrderError as error:
                found.append(str(error))
        stages = [f"{layer}.{stage}" for layer in (0, 1) for stage in _STAGES]
        for stage, text in zip(stages, found, strict=True):
            wanted = ("rank 1: epoch 0 step ", f"/ep {stage}: the forward pass", "last tickets: ")
            if any(part not in text for part in wanted):
                raise WrongDataError(f"an error that does not say enough: {text}")
        return f"left before each of {len(found)} collectives, refused each time: {found[-1]}"

    return outcome_of(run)


_STAGES = ("counts", "dispatch", "combine")


def prefetch_until_done() -> Outcome:
    """How often ranks meet depends on how far the cache of each has come."""

    async def program(rank: BareRank) -> None:
        fetched, polls = 0, 0
        while fetched < 4:
            fetched += (2, 1)[rank.rank]
            polls += 1
            await rank.gather("cache", f"least progress, poll {polls}", fetched)
        await rank.gather("ep", "dispatch")

    return outcome_of(lambda: str(run_bare(program)))


def caches_that_differ() -> Outcome:
    """One rank finds the context in its cache, the other computes it: the plan sees only bounds."""

    def run() -> str:
        script = {
            rank: [(0, turn(rank, 12, 2)), (9, turn(rank + 2, 14, 4, prompt=prompt))]
            for rank, prompt in ((0, 0), (1, 5))
        }
        ranks = run_small(PAIR, script)
        cached = [rank.results[number + 2].cached_tokens for number, rank in enumerate(ranks)]
        if cached[0] == 0 or cached[1] != 0:
            raise WrongDataError(f"tokens found in the caches: {cached}")
        return (
            f"{cached[0]} of 14 tokens cached on rank 0, none on rank 1; {same_collectives(ranks)}"
        )

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=5,
        url="https://github.com/vllm-project/vllm/pull/25906",
        title="graph or eager chosen by local tokens",
        how="in process",
        expected="hang",
        unsafe=graph_by_local_tokens,
        ours=bucket_by_agreed_rows,
    ),
    Hazard(
        row=8,
        url="https://github.com/sgl-project/sglang/issues/27221",
        title="each rank aborts by its own clock",
        how="in process",
        expected="hang",
        unsafe=aborts_by_own_clock,
        ours=only_the_leader_aborts,
    ),
    Hazard(
        row=9,
        url="https://github.com/sgl-project/sglang/issues/33289",
        title="one rank leaves a loop that its peer goes on in",
        how="in process",
        expected="hang",
        unsafe=one_rank_leaves_the_loop,
        ours=leaving_is_refused_by_name,
    ),
    Hazard(
        row=10,
        url="https://github.com/sgl-project/sglang/issues/30760",
        title="collectives repeated until local progress is enough",
        how="in process",
        expected="hang",
        unsafe=prefetch_until_done,
        ours=caches_that_differ,
    ),
)
