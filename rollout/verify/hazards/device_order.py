"""Rows 28, 29, 31 and 32 of the catalogue: several communicators on devices that queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from interlace.comm.collectives import Gather, finish
from interlace.comm.path import Op, Ticket
from interlace.comm.plan import StepPlan
from interlace.comm.testing import LocalWorld

from .bare import BareRank, run_bare
from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules, run_kernels, spin
from .stamped import NUM_OURS, gathering, run_stamped, two_paths


def _launch(local: LocalWorld, rank: int, name: str, members: Sequence[int]) -> tuple[Any, Any]:
    """Put one collective of the communicator `name` into the rank's queue."""
    ticket = Ticket(
        epoch=0,
        step=0,
        seq=0,
        path=name,
        path_seq=0,
        comm_seq=0,
        slot=0,
        op=Op(kind="Gather", role=name, stage="0"),
        version=0,
        rows=0,
    )
    end = local.communicator(name, members, rank)
    return end, end.post(Gather(role=name, stage="0", payload=[rank]), ticket)


def _launched(orders: Sequence[Sequence[tuple[str, Sequence[int]]]], seed: int) -> None:
    """Every rank launches its list at once, on a device that runs one after the other."""
    local = LocalWorld(len(orders), split=_none, concat=_none, copy=list, seed=seed, serial_slots=1)

    async def rank_of(rank: int) -> None:
        posted = [(name, *_launch(local, rank, name, who)) for name, who in orders[rank]]
        for name, end, handle in posted:
            await finish(end, handle, f"rank {rank} waits for {name}")

    local.run([rank_of(rank) for rank in range(len(orders))])


def _none(*_: Any) -> Any:
    raise AssertionError("only gathers")


def odd_ranks_launch_the_other_way() -> Outcome:
    """Two collectives on devices that run one after the other; odd ranks launch them reversed."""
    both = (0, 1)
    even, odd = [("nccl", both), ("deepep", both)], [("deepep", both), ("nccl", both)]
    return outcome_of(lambda: in_schedules(lambda seed: _launched([even, odd], seed)))


def one_order_on_strict_devices() -> Outcome:
    """Both paths in the plan's order, on devices that run one after the other."""
    return outcome_of(
        lambda: in_schedules(lambda s: run_stamped(seed=s, serial_slots=1), num=NUM_OURS)
    )


PAIRS = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}


def pairs_in_a_ring() -> Outcome:
    """No two ranks contradict each other on any communicator; the three together do."""
    firsts = (("a", "c"), ("b", "a"), ("c", "b"))
    orders = [[(name, PAIRS[name]) for name in names] for names in firsts]
    return outcome_of(lambda: in_schedules(lambda seed: _launched(orders, seed)))


def pairs_under_one_order() -> Outcome:
    """Three paths over the same three pairs: the order is one over all groups."""
    works = {"a": "decode", "b": "prefill", "c": "prefill"}
    paths = [
        gathering(name, {"ep": (PAIRS[name],)}, work=work, num_layers=4)
        for name, work in works.items()
    ]
    return outcome_of(
        lambda: in_schedules(
            lambda s: run_stamped(seed=s, ranks=3, paths=paths, serial_slots=1), num=NUM_OURS
        )
    )


COMMUNICATORS, BLOCKS, PLACES = ("tp", "dp", "ep"), 2, 3


def _resident(seed: int) -> None:
    """Three kernels of two blocks each, launched in one order; a device has places for three
    blocks and fills them as it likes. A kernel ends once all its blocks run on both devices."""
    free = dict.fromkeys((0, 1), PLACES)
    running: set[tuple[str, int, int]] = set()

    async def block(name: str, nth: int, rank: int) -> None:
        where = f"rank {rank}: block {nth} of {name}"
        await spin(lambda: free[rank] > 0, f"{where} waits for a place")
        free[rank] -= 1
        running.add((name, nth, rank))
        every = {(name, other, peer) for other in range(BLOCKS) for peer in free}
        await spin(lambda: every <= running, f"{where} waits for the others")
        free[rank] += 1

    run_kernels(
        [
            block(name, nth, rank)
            for rank in free
            for name in COMMUNICATORS
            for nth in range(BLOCKS)
        ],
        seed,
    )


def three_kernels_do_not_fit() -> Outcome:
    """Every device fills up with blocks of kernels that wait for blocks which no longer fit."""
    return outcome_of(lambda: in_schedules(_resident))


def one_collective_at_a_time() -> Outcome:
    """Each of three paths in turn: our order asks a device for one place."""
    groups = {"ep": ((0, 1),)}
    works = {"tp": "decode", "dp": "prefill", "ep": "prefill"}
    paths = [gathering(name, groups, work=work) for name, work in works.items()]
    return outcome_of(
        lambda: in_schedules(
            lambda s: run_stamped(seed=s, paths=paths, serial_slots=1), num=NUM_OURS
        )
    )


async def _other_order(rank: BareRank, host_waits: bool) -> None:
    """The last rank begins with the other group; the host may wait for a number in between."""
    names = ("shard", "replicate") if rank.rank < 3 else ("replicate", "shard")
    posted = []
    for name in names:
        end = rank.end(name)
        handle = end.post(Gather(role=name, stage="0", payload=[rank.rank]), None)
        where = f"rank {rank.rank} waits{' on the host' * host_waits} for {name}"
        if host_waits:
            await finish(end, handle, where)
        else:
            posted.append((end, handle, where))
    for end, handle, where in posted:
        await finish(end, handle, where)


def host_waits_between_two_launches() -> Outcome:
    """One rank of four in another order, and every host waits between its two launches; without
    that wait the same order passes, as these devices forgive it."""

    def one(seed: int) -> None:
        run_bare(lambda rank: _other_order(rank, False), size=4, seed=seed)
        run_bare(lambda rank: _other_order(rank, True), size=4, seed=seed)

    return outcome_of(lambda: in_schedules(one))


def host_waits_in_one_order() -> Outcome:
    """Every ticket waits on the host for its path's last result, as counts need; on all ranks
    before the same post."""

    def run() -> str:
        paths = two_paths(4)
        plans: list[StepPlan] = []

        def one(seed: int) -> None:
            plans[:] = run_stamped(seed=seed, ranks=4, paths=paths, serial_slots=1, num_steps=5)

        said = in_schedules(one, num=NUM_OURS)
        order = [ticket.path for plan in plans for ticket in plan.tickets]
        changes = sum(one != other for one, other in itertools.pairwise(order))
        if not changes:
            raise WrongDataError("the paths never took turns")
        return f"{said}; the paths took turns {changes} times in {len(order)} tickets"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=28,
        url="https://github.com/deepseek-ai/DeepEP/issues/496",
        title="even and odd ranks launch the collectives of two libraries in another order",
        how="serial device",
        expected="hang",
        unsafe=odd_ranks_launch_the_other_way,
        ours=one_order_on_strict_devices,
    ),
    Hazard(
        row=29,
        url="https://github.com/NVIDIA/nccl/issues/195",
        title="three communicators over three ranks, launched in a ring",
        how="serial device",
        expected="hang",
        unsafe=pairs_in_a_ring,
        ours=pairs_under_one_order,
    ),
    Hazard(
        row=31,
        url="https://github.com/ROCm/rccl/issues/2191",
        title="one order, but the kernels of three communicators do not fit a device together",
        how="serial device",
        expected="hang",
        unsafe=three_kernels_do_not_fit,
        ours=one_collective_at_a_time,
    ),
    Hazard(
        row=32,
        url="https://github.com/meta-pytorch/torchrec/pull/4149",
        title="another order on few ranks, and a host that waits between two launches",
        how="in process",
        expected="hang",
        unsafe=host_waits_between_two_launches,
        ours=host_waits_in_one_order,
    ),
)
