"""Row 34 of the catalogue: two threads use one process group."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.collectives import Collective
from interlace.comm.driver import run_blocking
from interlace.comm.path import Ticket
from interlace.comm.plan import PlanConfig

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .stamped import StampedRank, always, stamped, two_paths
from .threads import RANKS, TIMEOUT_S, in_threads


def _gloo_groups(name: str) -> list[Any]:
    """One group of two ranks that live in this process."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        prefix = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        groups[rank] = dist.ProcessGroupGloo(prefix, rank, len(RANKS), timedelta(seconds=TIMEOUT_S))

    in_threads([lambda rank=rank: join(rank) for rank in RANKS])  # type: ignore[misc]
    return [groups[rank] for rank in RANKS]


def two_threads_on_one_group() -> Outcome:
    """Both paths sum over one gloo group, each from its own thread; which of a rank's threads
    comes first is drawn. No error, wrong sums."""

    def run() -> str:
        groups, draw, num, num_wrong = _gloo_groups("shared"), random.Random(0), 40, 0
        for _ in range(num):
            values = {
                (rank, path): torch.tensor([value])
                for rank in RANKS
                for path, value in (("prefill", 100), ("decode", 1))
            }
            works: list[Any] = []

            def post(rank: int, path: str, values: Any = values, works: list[Any] = works) -> None:
                works.append(groups[rank].allreduce([values[rank, path]]))

            for rank in RANKS:
                for path in draw.sample(("prefill", "decode"), 2):
                    in_threads([lambda rank=rank, path=path: post(rank, path)])  # type: ignore[misc]
            for work in works:
                work.wait()
            sums = [values[0, path].item() for path in ("prefill", "decode")]
            num_wrong += sums != [200, 2]
        if num_wrong:
            raise WrongDataError(f"{num_wrong} of {num} pairs of sums are wrong, without an error")
        return f"{num} pairs of sums"

    return outcome_of(run)


class _Gathering:
    """A communicator over one gloo group of this process; only gathers of bytes."""

    timeout_s = TIMEOUT_S

    def __init__(self, group: Any) -> None:
        self._group = group

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        sent = torch.frombuffer(bytearray(request.payload), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in RANKS]
        return self._group.allgather([received], [sent]), received

    def poll(self, handle: Any) -> bool:
        return bool(handle[0].is_completed())

    def result(self, handle: Any) -> list[bytes]:
        handle[0].wait()
        return [part.numpy().tobytes() for part in handle[1]]

    def abort(self) -> None: ...


def a_group_and_a_turn_for_each_path() -> Outcome:
    """A rank is one thread: it posts for both paths, each over its own gloo group."""

    def run() -> str:
        paths = two_paths()
        groups = {name: _gloo_groups(name) for name in ("decode", "prefill", "control")}
        members = [
            StampedRank(
                rank,
                PlanConfig(paths=paths, mode="multiplexed"),
                {(path.name, "ep"): _Gathering(groups[path.name][rank]) for path in paths},
                _Gathering(groups["control"][rank]),
            )
            for rank in RANKS
        ]

        def drive(rank: int) -> None:
            loop = members[rank].run(always(), 10, stamped, lambda *_: None)
            run_blocking(loop, park=lambda seconds: None)

        in_threads([lambda rank=rank: drive(rank) for rank in RANKS])  # type: ignore[misc]
        plans = [member.plans for member in members]
        if plans[0] != plans[1] or len(plans[0]) != 10:
            raise WrongDataError(f"ranks made {[len(each) for each in plans]} steps")
        num = sum(len(plan.tickets) for plan in plans[0])
        return f"{num} collectives of two paths over gloo, all right"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=34,
        url="https://github.com/pytorch/pytorch/pull/131895",
        title="two threads sum over one gloo group: wrong sums, no error",
        how="threads",
        expected="wrong data",
        unsafe=two_threads_on_one_group,
        ours=a_group_and_a_turn_for_each_path,
    ),
)
