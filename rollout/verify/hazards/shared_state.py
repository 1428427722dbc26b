"""Rows 19, 20, 22, 23 of the catalogue: collectives in flight share one piece of protocol state."""

from __future__ import annotations

from collections.abc import Callable

from interlace.comm.plan import StepPlan

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules, pause, run_kernels, spin
from .stamped import NUM_OURS, gathering, run_stamped, two_paths

RANKS = (0, 1)


class PushAllReduce:
    """A zero means not here yet, and whoever has summed writes zeros: no flag is needed, and
    which half of the buffer is used follows from how many calls have ended."""

    def __init__(self) -> None:
        self.inbox = [[[0 for _ in RANKS] for _ in RANKS] for _ in range(2)]
        self.num_ended = [0 for _ in RANKS]

    async def run(self, rank: int, stream: str, value: int) -> int:
        half = self.inbox[self.num_ended[rank] % 2]
        for peer in RANKS:
            half[peer][rank] = value
        await spin(lambda: all(half[rank]), f"rank {rank} stream {stream}: a zero is left")
        total = sum(half[rank])
        half[rank] = [0 for _ in RANKS]
        self.num_ended[rank] += 1
        return total


def _one_in_flight(seed: int) -> None:
    shared = PushAllReduce()
    streams = {"prefill": 10, "decode": 1}
    kernels = [shared.run(rank, name, value) for rank in RANKS for name, value in streams.items()]
    totals = run_kernels(kernels, seed)
    if totals != [20, 2, 20, 2]:
        raise WrongDataError(f"sums {totals} instead of 20 and 2 on both ranks")


def two_streams_one_communicator() -> Outcome:
    """Both streams use the same half of the buffer, and the first to have summed empties it."""
    return outcome_of(lambda: in_schedules(_one_in_flight))


def a_communicator_for_each_path() -> Outcome:
    """Prefill and decode over the same ranks, in shipped windows of their own."""
    return outcome_of(
        lambda: in_schedules(lambda s: run_stamped(seed=s, window=True), num=NUM_OURS)
    )


class TwoSlots:
    """Low-latency all-to-all: the slot follows from the order of calls, a signal goes one way,
    and sending clears the signals of the other slot for the call after this one."""

    def __init__(self) -> None:
        self.signals: list[list[list[int | None]]] = [
            [[None for _ in RANKS] for _ in RANKS] for _ in range(2)
        ]
        self._num_calls = [0 for _ in RANKS]

    def send(self, rank: int, value: int) -> int:
        slot = self._num_calls[rank] % 2
        self._num_calls[rank] += 1
        self.signals[1 - slot][rank] = [None for _ in RANKS]
        for peer in RANKS:
            self.signals[slot][peer][rank] = value
        return slot

    async def receive(self, rank: int, slot: int, what: str) -> list[int | None]:
        where = f"rank {rank}: {what} waits for a signal in slot {slot}"
        await spin(lambda: None not in self.signals[slot][rank], where)
        return self.signals[slot][rank]


async def _prefill_pending(buffer: TwoSlots, rank: int) -> None:
    prefill = buffer.send(rank, 10)
    await pause()
    decode = buffer.send(rank, 1)
    await pause()
    for slot, what, value in ((decode, "decode", 1), (prefill, "prefill", 10)):
        received = await buffer.receive(rank, slot, what)
        if received != [value, value]:
            raise WrongDataError(f"rank {rank}: {what} reads {received}")


def _cleared(seed: int) -> None:
    buffer = TwoSlots()
    run_kernels([_prefill_pending(buffer, rank) for rank in RANKS], seed)


def a_pending_slot_is_cleared() -> Outcome:
    """Prefill has sent and is yet to receive; decode's send clears what has arrived for it."""
    return outcome_of(lambda: in_schedules(_cleared))


def a_pending_prefill_outlasts_decodes() -> Outcome:
    """A collective of prefill stays outstanding while a whole decode runs, from step to step."""

    def run() -> str:
        plans: list[StepPlan] = []

        def one(seed: int) -> None:
            plans[:] = run_stamped(seed=seed, window=True, paths=two_paths(num_layers=5))

        said = in_schedules(one, num=NUM_OURS)
        carried = sum(0 < dict(plan.after.position).get("prefill", 0) < 5 for plan in plans)
        if not carried:
            raise WrongDataError("no prefill was in flight between two steps")
        return f"{said}; prefill in flight across {carried} of {len(plans)} steps"

    return outcome_of(run)


class DeviceCounter:
    """One count of operations in device memory, which every kernel reads and writes."""

    def __init__(self) -> None:
        self.count = [0 for _ in RANKS]
        self.arrived: set[tuple[int, int]] = set()

    async def run(self, rank: int, stream: int) -> None:
        mine = self.count[rank]
        await pause()
        self.count[rank] = mine + 1
        self.arrived.add((rank, mine))
        await spin(
            lambda: all((peer, mine) in self.arrived for peer in RANKS),
            f"rank {rank} stream {stream}: operation {mine} of the other rank",
        )


def four_streams_one_communicator() -> Outcome:
    """Two kernels read the same count before either writes it back."""

    def one(seed: int) -> None:
        shared = DeviceCounter()
        run_kernels([shared.run(rank, stream) for rank in RANKS for stream in range(4)], seed)

    return outcome_of(lambda: in_schedules(one))


def four_paths_four_communicators() -> Outcome:
    """The count travels in the ticket, one for each communicator."""
    paths = (
        gathering("decode", {"ep": (RANKS,)}, work="decode"),
        *(gathering(f"prefill{nth}", {"ep": (RANKS,)}, work="prefill") for nth in range(3)),
    )
    return outcome_of(
        lambda: in_schedules(lambda s: run_stamped(seed=s, paths=paths, window=True), num=NUM_OURS)
    )


class SignalPads:
    """One signal per (block, sender, receiver): set by the sender, cleared by the receiver."""

    def __init__(self) -> None:
        self.pads: dict[tuple[str, int, int, int], bool] = {}
        self.free = [2 for _ in RANKS]
        """Places for blocks that a device has left."""

    async def block(
        self, channel: str, block: int, rank: int, may_start: Callable[[], bool]
    ) -> None:
        """Two barriers, as at both ends of a reduction; blocks wait for a place on the device."""
        where = f"rank {rank}: block {block} on channel {channel}"
        await spin(lambda: self.free[rank] > 0 and may_start(), f"{where} waits for a place")
        self.free[rank] -= 1
        peer = 1 - rank
        there, here = (channel, block, rank, peer), (channel, block, peer, rank)
        for _ in range(2):
            await spin(lambda: not self.pads.get(there), f"{where} waits to signal")
            self.pads[there] = True
            await spin(lambda: bool(self.pads.get(here)), f"{where} waits for a signal")
            self.pads[here] = False
        self.free[rank] += 1


def _pads(seed: int, channels: dict[str, str]) -> None:
    """Two kernels of two blocks, two places. Rank 0's device begins with the first block of each,
    rank 1's with one kernel and then the other."""
    pads = SignalPads()
    done: set[tuple[str, int, int]] = set()
    first = {(kernel, 0, 0) for kernel in channels}

    async def tracked(kernel: str, block: int, rank: int) -> None:
        def may_start() -> bool:
            if rank == 1:
                return kernel == "A" or {("A", 0, 1), ("A", 1, 1)} <= done
            if block == 0:
                return True
            return ("A", 1, 0) in done if kernel == "B" else bool(done & first)

        await pads.block(channels[kernel], block, rank, may_start)
        done.add((kernel, block, rank))

    run_kernels(
        [tracked(name, block, rank) for rank in RANKS for name in channels for block in range(2)],
        seed,
    )


def one_signal_channel() -> Outcome:
    """Two kernels whose blocks run in another order on the other rank, over one channel."""
    return outcome_of(lambda: in_schedules(lambda s: _pads(s, {"A": "shared", "B": "shared"})))


def signals_of_their_own() -> Outcome:
    """The same kernels and devices with a channel each, then the shipped windows."""

    def run() -> str:
        in_schedules(lambda s: _pads(s, {"A": "A", "B": "B"}))
        return in_schedules(lambda s: run_stamped(seed=s, window=True, num_steps=5), num=NUM_OURS)

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=19,
        url="https://github.com/sgl-project/sglang/issues/31117",
        title="two streams reduce over one communicator that can have one operation in flight",
        how="window",
        expected="hang",
        unsafe=two_streams_one_communicator,
        ours=a_communicator_for_each_path,
    ),
    Hazard(
        row=20,
        url="https://github.com/deepseek-ai/DeepEP/issues/513",
        title="a later call clears the signals of a call that is still to be received",
        how="window",
        expected="hang",
        unsafe=a_pending_slot_is_cleared,
        ours=a_pending_prefill_outlasts_decodes,
    ),
    Hazard(
        row=22,
        url="https://github.com/ROCm/rccl/issues/2179",
        title="four streams race for the operation count of one communicator",
        how="window",
        expected="hang",
        unsafe=four_streams_one_communicator,
        ours=four_paths_four_communicators,
    ),
    Hazard(
        row=23,
        url="https://github.com/pytorch/pytorch/issues/189228",
        title="reductions on several streams take each other's signals from one channel",
        how="window",
        expected="hang",
        unsafe=one_signal_channel,
        ours=signals_of_their_own,
    ),
)
