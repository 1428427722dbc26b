"""Rows 7, 11, 16 and 17: the wrong group, a group made late, a rank that fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.communicator import Communicator
from interlace.comm.errors import CommunicationError
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.launch.transport import AMPLE, Groups
from interlace.rollout.messages import Event, TurnResult

from .bare import BareRank, run_bare
from .foreign_operations import all_right, stuck, unexpected
from .gloo import join, run_over_gloo
from .hazard import Hazard, Outcome, Processes, RankEnd, WrongDataError, outcome_of
from .small_rollout import Script, Size, run_small, same_collectives, turn

SHORT_S = 0.4
SHORT = timedelta(seconds=SHORT_S)
BOTH: Script = {0: [(0, turn(1, 6, 6))], 1: [(1, turn(3, 3, 4))]}


def other_order_of_groups(rank: int, size: int, folder: str) -> str:
    """Both ranks make two groups, in another order: what one calls A is the other's B."""
    join(rank, size, folder)
    groups = [dist.new_group(timeout=SHORT) for _ in range(2)]
    sync = groups[rank]  # each by its own count
    gathered = [torch.empty(1) for _ in range(size)]
    dist.all_gather(gathered, torch.ones(1), group=sync)
    return "went on"


class OtherOrder(ProcessTransport):
    """Makes the groups of two paths in the other order."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._made: dict[str, Communicator] = {}

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        if not self._made:
            for name in ("prefill", "decode"):
                self._made[name] = super().communicator(name, role, groups, num_bytes)
        return self._made[path]


def error_names_the_collective(rank: int, size: int, folder: str) -> str:
    """The same mistake on rank 1 of ours: what the wait that never ends says on both."""
    kind = OtherOrder if rank else ProcessTransport
    try:
        run_over_gloo(rank, size, folder, BOTH, transport=kind, ticket_timeout_s=SHORT_S)
    except CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    raise WrongDataError("groups in another order went unseen")


def both_name_it(ends: Sequence[RankEnd]) -> Outcome:
    """Whoever gives up names rank, step, path, group and stage; the other is told by its end."""
    for rank, end in enumerate(ends):
        wanted = f": rank {rank}: epoch 0 step 0 seq 0 prefill/ep 0.counts"
        if "TimeoutError" in end.said and wanted in end.said and all(e.said for e in ends):
            return Outcome(kind="right", evidence=f"over gloo: {end.said}")
    return unexpected(ends)


def wrong_group_for_the_cache() -> Outcome:
    """The cache of the busy one of two pairs meets over the group of all four."""

    async def program(rank: BareRank) -> None:
        if rank.rank < 2:
            await rank.gather("world", "cache hits, least of the pair")
        await rank.gather("ep", "dispatch")

    return outcome_of(lambda: str(run_bare(program, size=4)))


def each_pair_over_its_own_group() -> Outcome:
    """What concerns one pair goes over its own group, however idle the other is."""

    def run() -> str:
        ranks = run_small(Size(world=4, tp=2), {0: [(0, turn(1, 9, 4))]})
        groups = [
            {record.role: record.members for record in rank.engine.journal.tickets}
            for rank in ranks
        ]
        wanted = [{"tp": pair, "ep": (0, 1, 2, 3)} for pair in ((0, 1), (2, 3)) for _ in range(2)]
        if groups != wanted:
            raise WrongDataError(f"members of the groups used: {groups}")
        return f"pair (2, 3) idle: {same_collectives(ranks)}, tensor-parallel ones in pairs"

    return outcome_of(run)


def group_made_when_needed(rank: int, size: int, folder: str) -> str:
    """Only the rank with a draft makes the draft's group; the other goes on to the next step."""
    join(rank, size, folder)
    steps = dist.new_group(timeout=SHORT)
    if rank == 0:
        drafts = dist.new_group(timeout=SHORT)
        dist.all_reduce(torch.ones(1), group=drafts)
    dist.all_reduce(torch.ones(1), group=steps)
    return "went on"


def groups_made_at_the_start(rank: int, size: int, folder: str) -> str:
    """Every group exists before the first step, whichever path a rank needs first."""
    made: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise WrongDataError("a group was made after the start")

    def composed() -> None:
        made.append(f"{dist.distributed_c10d._world.group_count} groups made at the start")
        dist.new_group = refuse

    right = run_over_gloo(rank, size, folder, BOTH, composed=composed)
    return f"{made[0]}, none later; {right}"


def failed_put_skips() -> Outcome:
    """A put that fails on one rank is caught there, and with it the collective behind it."""

    async def program(rank: BareRank) -> None:
        for step in range(4):
            try:
                if rank.rank == 1 and step == 2:
                    raise OSError("put of a KV block failed")
                await rank.gather("tp", f"all blocks of step {step} are put")
            except OSError:
                continue
        await rank.gather("tp", "next prefill")

    return outcome_of(lambda: str(run_bare(program)))


def failure_ends_all(rank: int, size: int, folder: str) -> str:
    """A failure that a rank cannot hide ends every rank at once, by a typed error."""

    def put(event: Event) -> None:
        if rank == 1 and isinstance(event, TurnResult):
            raise OSError("put of a result failed")

    script: Script = {0: [(0, turn(1, 6, 40))], 1: [(0, turn(3, 3, 4))]}
    try:
        run_over_gloo(rank, size, folder, script, emit=put)
    except (CommunicationError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    raise WrongDataError("the others went on")


def ended_soon(ends: Sequence[RankEnd]) -> Outcome:
    """Rank 1 failed, rank 0 had a typed error long before its deadline of 5 s."""
    other, failed = ends
    behind = other.seconds - failed.seconds
    if failed.said.startswith("OSError: put") and "LostError: " in other.said and behind < 2.5:
        return Outcome(kind="right", evidence=f"{failed.said}; rank 0: {other.said}")
    return unexpected(ends)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=7,
        url="https://github.com/sgl-project/sglang/issues/34582",
        title="stuck in a group of other members, and the error does not say which",
        how="gloo processes",
        expected="timeout",
        unsafe=Processes(program=other_order_of_groups, judge=stuck),
        ours=Processes(program=error_names_the_collective, judge=both_name_it),
    ),
    Hazard(
        row=11,
        url="https://github.com/sgl-project/sglang/issues/7158",
        title="a collective of some over the group of all",
        how="in process",
        expected="hang",
        unsafe=wrong_group_for_the_cache,
        ours=each_pair_over_its_own_group,
    ),
    Hazard(
        row=16,
        url="https://github.com/sgl-project/sglang/issues/29144",
        title="a communicator first used where ranks differ",
        how="gloo processes",
        expected="timeout",
        unsafe=Processes(program=group_made_when_needed, judge=stuck),
        ours=Processes(program=groups_made_at_the_start, judge=all_right),
    ),
    Hazard(
        row=17,
        url="https://github.com/vllm-project/vllm-ascend/issues/14106",
        title="a failure of one rank's own changes what it takes part in",
        how="gloo processes",
        expected="hang",
        unsafe=failed_put_skips,
        ours=Processes(program=failure_ends_all, judge=ended_soon),
    ),
)
