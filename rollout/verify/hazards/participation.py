"""Rows 1, 2, 3 and 15: a rank with less to do takes part less often."""

from __future__ import annotations

from interlace.comm.errors import OrderError

from .bare import BareRank, run_bare
from .faulty_model import ReturnsEarly
from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .small_rollout import Size, run_small, same_collectives, turn

PAIR = Size()


def drained_rank_counts_otherwise() -> Outcome:
    """Every fourth step ends with a collective of its own; dummy steps are not counted."""

    async def program(rank: BareRank) -> None:
        drained_after, counted = (12, 3)[rank.rank], 0
        for step in range(12):
            busy = step < drained_after
            what = "forward" if busy else "dummy batch"
            await rank.gather("ep", f"{what} of step {step}")
            counted += busy
            if busy and counted % 4 == 0:
                await rank.gather("coordination", f"has anybody work, after step {step}?")

    return outcome_of(lambda: str(run_bare(program)))


def drained_rank_under_the_plan() -> Outcome:
    """The rank with no work left walks every step, and all stop by one agreed plan."""

    def run() -> str:
        ranks = run_small(PAIR, {0: [(0, turn(1, 6, 12))], 1: [(0, turn(2, 3, 2))]})
        last_rows = [
            max(step.step for step in rank.engine.journal.steps if dict(step.rows).get("decode"))
            for rank in ranks
        ]
        steps = [len(rank.engine.journal.steps) for rank in ranks]
        if steps[0] != steps[1] or last_rows[0] <= last_rows[1]:
            raise WrongDataError(f"steps {steps}, last rows in steps {last_rows}")
        return (
            f"rank 1 drained in step {last_rows[1]}, both stopped together after step "
            f"{steps[0] - 1}; {same_collectives(ranks)}"
        )

    return outcome_of(run)


def early_return_drifts() -> Outcome:
    """A step without tokens skips its collective: the others meet those of the wrong step."""
    foreign: list[str] = []

    async def program(rank: BareRank) -> None:
        for step in range(10):
            if rank.rank == 1 and step in (2, 6):
                continue  # zero tokens
            answer = await rank.gather("ep", f"reduce-scatter of step {step}", step)
            if answer != [step, step]:
                foreign.append(f"step {step} on rank {rank.rank} summed steps {answer}")

    outcome = outcome_of(lambda: str(run_bare(program)))
    if outcome.kind != "hang" or not foreign:
        return outcome
    return Outcome(kind="hang", evidence=f"unseen: {foreign[0]}; later {outcome.evidence}")


def early_return_is_refused() -> Outcome:
    """Steps without tokens are right; the early return is refused in the step it happens in."""
    script = {0: [(0, turn(1, 6, 9))], 1: [(0, turn(2, 3, 3))]}

    def run() -> str:
        right = same_collectives(run_small(PAIR, script))
        try:
            run_small(PAIR, script, models={1: ReturnsEarly})
        except OrderError as error:
            if f"epoch 0 step {_first_empty_step()} " not in str(error):
                raise WrongDataError(f"found too late: {error}") from error
            return f"{right}; the early return: {error}"
        raise WrongDataError("the early return went unseen")

    def _first_empty_step() -> int:
        steps = run_small(PAIR, script)[1].engine.journal.steps
        return min(step.step for step in steps if any(num == 0 for _, num in step.rows))

    return outcome_of(run)


def idle_rank_returns() -> Outcome:
    """A rank without requests returns before its dummy forward."""

    async def program(rank: BareRank) -> None:
        if rank.rank == 1:
            return
        counts = await rank.gather("ep", "counts of dispatch", [3, 2])
        await rank.exchange("ep", "dispatch", [1] * 5, (3, 2), [count[0] for count in counts])

    return outcome_of(lambda: str(run_bare(program)))


def idle_rank_walks_the_empty_path() -> Outcome:
    """A rank that never has a row issues every collective, with no rows."""

    def run() -> str:
        ranks = run_small(PAIR, {0: [(0, turn(1, 9, 5)), (2, turn(2, 5, 3))]})
        rows = sum(num for step in ranks[1].engine.journal.steps for _, num in step.rows)
        if rows:
            raise WrongDataError(f"the idle rank had {rows} rows")
        return f"rank 1 without any row: {same_collectives(ranks)}"

    return outcome_of(run)


def uneven_batches() -> Outcome:
    """Five batches over two data-parallel ranks, while the experts span both."""

    async def program(rank: BareRank) -> None:
        for batch in range(rank.rank, 5, 2):
            await rank.gather("ep", f"dispatch of batch {batch}")

    return outcome_of(lambda: str(run_bare(program)))


def uneven_turns() -> Outcome:
    """How many turns a rank has changes what is in its batches, not how many there are."""

    def run() -> str:
        turns = {rank: [(0, turn(at, 5, 3)) for at in range(rank, 5, 2)] for rank in (0, 1)}
        ranks = run_small(PAIR, turns)
        counts = [len(rank.results) for rank in ranks]
        if counts != [3, 2]:
            raise WrongDataError(f"turns ended: {counts}")
        return f"3 turns on rank 0, 2 on rank 1: {same_collectives(ranks)}"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=1,
        url="https://github.com/vllm-project/vllm/issues/28224",
        title="a drained rank counts its dummy steps otherwise",
        how="in process",
        expected="hang",
        unsafe=drained_rank_counts_otherwise,
        ours=drained_rank_under_the_plan,
    ),
    Hazard(
        row=2,
        url="https://github.com/vllm-project/vllm/issues/43547",
        title="a step without tokens returns early",
        how="in process",
        expected="hang",
        unsafe=early_return_drifts,
        ours=early_return_is_refused,
    ),
    Hazard(
        row=3,
        url="https://github.com/vllm-project/vllm/pull/51984",
        title="an idle rank returns before its dummy forward",
        how="in process",
        expected="hang",
        unsafe=idle_rank_returns,
        ours=idle_rank_walks_the_empty_path,
    ),
    Hazard(
        row=15,
        url="https://github.com/NVIDIA/Model-Optimizer/pull/1966",
        title="uneven numbers of batches over ranks that share experts",
        how="in process",
        expected="hang",
        unsafe=uneven_batches,
        ours=uneven_turns,
    ),
)
