"""Rows 21 and 24 to 27 of the catalogue: who writes where in memory that several calls share."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from interlace.comm.plan import PlanConfig, PlanState, plan
from interlace.comm.proposal import Proposal
from interlace.comm.workspace import Workspace
from interlace.rollout.batching import max_rows

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules, pause, run_kernels, spin
from .stamped import NUM_OURS, always, gathering, run_stamped, two_paths

RANKS = (0, 1)


class LowLatencyBuffer:
    """Tokens first, the count behind the most tokens there can be: both ends must mean the same."""

    def __init__(self) -> None:
        self._memory = bytearray(256)

    def write(self, tokens: Sequence[int], max_tokens: int) -> None:
        struct.pack_into(f"<{len(tokens)}I", self._memory, 0, *tokens)
        struct.pack_into("<I", self._memory, 4 * max_tokens, len(tokens))

    def count(self, max_tokens: int) -> int:
        (count,) = struct.unpack_from("<I", self._memory, 4 * max_tokens)
        return int(count)


def two_graphs_two_layouts() -> Outcome:
    """The sender replays the graph for 8 tokens a rank, the receiver the one for 4."""

    def run() -> str:
        buffer = LowLatencyBuffer()
        buffer.write([0x3F80_0000 + at for at in range(6)], max_tokens=8)
        count = buffer.count(max_tokens=4)
        if count != 6:
            raise WrongDataError(f"6 tokens were sent, a count of {count:,} is read")
        return "6 tokens"

    return outcome_of(run)


def one_agreed_capacity() -> Outcome:
    """Both ranks take the capacity from the plan, whatever they have themselves; a window says in
    its header how many bytes are whose."""

    def run() -> str:
        config = PlanConfig(paths=two_paths(), mode="multiplexed")
        rows = (3, 7)
        proposals = [
            Proposal(rank=rank, leader=True, decode_rows=num, idle=False)
            for rank, num in enumerate(rows)
        ]
        agreed = [plan(PlanState(), proposals, config) for _ in RANKS]
        capacities = {max_rows(("decode",), decoding=p.decoding, chunk_tokens=64) for p in agreed}
        if capacities != {max(rows)}:
            raise WrongDataError(f"capacities {capacities} for {rows} rows")
        said = in_schedules(lambda s: run_stamped(seed=s, window=True, num_steps=4), num=NUM_OURS)
        return f"one capacity of {max(rows)} rows; messages of 7 sizes in one window {said}"

    return outcome_of(run)


async def _barrier_between_blocks(
    locks: bytearray, layer: int, block: int, num_blocks: int, path: str
) -> None:
    """Blocks of one kernel add up their parts in turn; the last sets the lock back to 0."""
    where = f"{path} layer {layer}: block {block} of {num_blocks} waits for its turn"
    await spin(lambda: locks[layer] == block, where)
    await pause()
    locks[layer] = 0 if block == num_blocks - 1 else locks[layer] + 1


def _same_layer(seed: int, locks_of: Callable[[str], bytearray]) -> None:
    run_kernels(
        [
            _barrier_between_blocks(locks_of(path), 1, block, num_blocks, path)
            for path, num_blocks in (("prefill", 3), ("decode", 2))
            for block in range(num_blocks)
        ],
        seed,
    )


def locks_by_layer_alone() -> Outcome:
    """Two kernels of the same layer count up one lock."""

    def one(seed: int) -> None:
        shared = bytearray(4)
        _same_layer(seed, lambda path: shared)

    return outcome_of(lambda: in_schedules(one))


def locks_in_the_workspace_of_the_path() -> Outcome:
    """The same kernels over locks from each path's Workspace."""

    def one(seed: int) -> None:
        spaces = {name: Workspace(name, bytearray) for name in ("prefill", "decode")}
        locks = {name: space.borrow("locks", 4) for name, space in spaces.items()}
        _same_layer(seed, locks.__getitem__)

    return outcome_of(lambda: in_schedules(one))


QUARTET = {"tp": ((0, 1), (2, 3)), "ep": ((0, 1, 2, 3),)}


def only_the_tp_group_is_doubled() -> Outcome:
    """Prefill has a tp group of its own and borrows decode's ep group."""
    paths = tuple(gathering(name, QUARTET, work=name) for name in ("decode", "prefill"))
    borrowed = {("prefill", "ep"): ("decode", "ep")}
    return outcome_of(
        lambda: in_schedules(
            lambda s: run_stamped(seed=s, ranks=4, paths=paths, alias=borrowed, verify=False),
            num=NUM_OURS,
        )
    )


def every_group_is_doubled() -> Outcome:
    """Both roles of both paths have windows of their own; two of the groups intersect."""
    paths = tuple(gathering(name, QUARTET, work=name) for name in ("decode", "prefill"))
    return outcome_of(
        lambda: in_schedules(
            lambda s: run_stamped(seed=s, ranks=4, paths=paths, window=True, num_steps=4), num=5
        )
    )


class FlagBehindData:
    """The flag stands behind the data, so where it is depends on how much there is."""

    def __init__(self) -> None:
        self.inbox = [[[0] * 8 for _ in RANKS] for _ in RANKS]

    async def run(self, rank: int, nth: int, size: int) -> None:
        for peer in RANKS:
            self.inbox[peer][rank][:size] = [100 + nth] * size
            self.inbox[peer][rank][size] = nth
        await pause()
        for peer in RANKS:
            cell = self.inbox[rank][peer]
            where = f"rank {rank}: flag {nth} of rank {peer} at {size}"
            await spin(lambda cell=cell: cell[size] == nth, where)  # type: ignore[misc]


def flags_move_with_the_size() -> Outcome:
    """The second, longer message runs over the flag of the first before a slow rank has seen it."""

    def one(seed: int) -> None:
        buffer = FlagBehindData()

        async def rank_of(rank: int) -> None:
            await buffer.run(rank, 1, 2)
            await buffer.run(rank, 2, 6)

        run_kernels([rank_of(rank) for rank in RANKS], seed)

    return outcome_of(lambda: in_schedules(one))


def flags_stay_where_they_are() -> Outcome:
    """Stamped messages change their size from one collective to the next."""
    return outcome_of(
        lambda: in_schedules(lambda s: run_stamped(seed=s, window=True), num=NUM_OURS)
    )


class Counters:
    """A barrier: everybody counts up at everybody's, and resets its own on the way out."""

    def __init__(self) -> None:
        self.arrived = [[False for _ in RANKS] for _ in RANKS]

    async def barrier(self, rank: int, nth: int) -> None:
        for peer in RANKS:
            self.arrived[peer][rank] = True
        await spin(lambda: all(self.arrived[rank]), f"rank {rank}: barrier {nth}")
        await pause()
        self.arrived[rank] = [False for _ in RANKS]


def one_set_of_counters() -> Outcome:
    """A fast rank arrives at the next barrier; a slow one, leaving this one, wipes it out."""

    def one(seed: int) -> None:
        counters = Counters()

        async def rank_of(rank: int) -> None:
            for nth in range(3):
                await counters.barrier(rank, nth)

        run_kernels([rank_of(rank) for rank in RANKS], seed)

    return outcome_of(lambda: in_schedules(one))


def two_slots_and_a_count() -> Outcome:
    """Slot and count come from the ticket; a release is never reset, only outdone."""

    def run() -> str:
        plans = run_stamped(num_steps=6, numbers=always(), window=True)
        slots = [t.slot for p in plans for t in p.tickets if t.path == "prefill"]
        if slots != [nth % 2 for nth in range(len(slots))]:
            raise WrongDataError(f"slots {slots} do not alternate")
        said = in_schedules(lambda s: run_stamped(seed=s, window=True), num=NUM_OURS)
        return f"slots alternate over {len(plans)} steps; {said}"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=21,
        url="https://github.com/deepseek-ai/DeepEP/issues/93",
        title="two graphs with other numbers of tokens lay out one buffer in two ways",
        how="window",
        expected="wrong data",
        unsafe=two_graphs_two_layouts,
        ours=one_agreed_capacity,
    ),
    Hazard(
        row=24,
        url="https://github.com/sgl-project/sglang/issues/37904",
        title="prefill and decode run the same layer over locks that are kept by layer",
        how="in process",
        expected="hang",
        unsafe=locks_by_layer_alone,
        ours=locks_in_the_workspace_of_the_path,
    ),
    Hazard(
        row=25,
        url="https://github.com/sgl-project/sglang/pull/20349",
        title="prefill has a tp group of its own but shares the other groups with decode",
        how="in process",
        expected="wrong data",
        unsafe=only_the_tp_group_is_doubled,
        ours=every_group_is_doubled,
    ),
    Hazard(
        row=26,
        url="https://github.com/vllm-project/vllm/pull/25892",
        title="the data of one reduction runs over the flag of the shorter one before it",
        how="window",
        expected="hang",
        unsafe=flags_move_with_the_size,
        ours=flags_stay_where_they_are,
    ),
    Hazard(
        row=27,
        url="https://github.com/vllm-project/vllm/pull/8558",
        title="one set of counters: leaving a barrier wipes out an arrival at the next",
        how="window",
        expected="hang",
        unsafe=one_set_of_counters,
        ours=two_slots_and_a_count,
    ),
)
