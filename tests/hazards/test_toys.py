"""What the unsafe ways share is what breaks them: the same kernels are right without it."""

from collections.abc import Callable

import pytest

from interlace.comm.errors import DeadlockError
from interlace.rollout.verify.hazards.hazard import WrongDataError
from interlace.rollout.verify.hazards.memory_layout import Counters, FlagBehindData
from interlace.rollout.verify.hazards.schedules import in_schedules, pause, run_kernels, spin
from interlace.rollout.verify.hazards.shared_state import (
    DeviceCounter,
    PushAllReduce,
    TwoSlots,
)
from interlace.rollout.verify.hazards.stamped import run_stamped

RANKS, PATHS = (0, 1), (("prefill", 10), ("decode", 1))


def reductions_of_their_own(seed: int) -> None:
    each = {name: PushAllReduce() for name, _ in PATHS}
    kernels = [each[name].run(rank, name, value) for rank in RANKS for name, value in PATHS]
    assert run_kernels(kernels, seed) == [20, 2, 20, 2]


def exchanges_of_their_own(seed: int) -> None:
    each = {name: TwoSlots() for name, _ in PATHS}

    async def rank_of(rank: int) -> None:
        slots = {}
        for name, value in PATHS:
            slots[name] = each[name].send(rank, value)
            await pause()
        for name, value in reversed(PATHS):
            assert await each[name].receive(rank, slots[name], name) == [value, value]

    run_kernels([rank_of(rank) for rank in RANKS], seed)


def counts_of_their_own(seed: int) -> None:
    each = [DeviceCounter() for _ in range(4)]
    run_kernels([each[stream].run(rank, stream) for rank in RANKS for stream in range(4)], seed)


def messages_of_one_size(seed: int) -> None:
    buffers = [FlagBehindData() for _ in range(2)]

    async def rank_of(rank: int) -> None:
        for nth in range(1, 5):
            await buffers[nth % 2].run(rank, nth, 4)

    run_kernels([rank_of(rank) for rank in RANKS], seed)


def two_sets_of_counters(seed: int) -> None:
    counters = [Counters(), Counters()]

    async def rank_of(rank: int) -> None:
        for nth in range(6):
            await counters[nth % 2].barrier(rank, nth)

    run_kernels([rank_of(rank) for rank in RANKS], seed)


@pytest.mark.parametrize(
    "run",
    [
        reductions_of_their_own,
        exchanges_of_their_own,
        counts_of_their_own,
        messages_of_one_size,
        two_sets_of_counters,
    ],
)
def test_the_kernels_are_right_where_nothing_is_shared(run: Callable[[int], None]) -> None:
    assert in_schedules(run) == "right in all of 40 schedules"


def test_schedules_report_what_most_often_goes_wrong() -> None:
    def run(seed: int) -> None:
        if seed % 3 == 0:
            raise WrongDataError("a number")
        if seed % 3 == 1:
            run_kernels([spin(lambda: False, "for ever")], seed)

    with pytest.raises(DeadlockError, match=r"of 9 schedules 3 hang, 3 go wrong otherwise") as two:
        in_schedules(lambda seed: run(seed + 1), num=9)
    assert "for ever" in str(two.value)
    with pytest.raises(WrongDataError, match=r"of 1 schedules 0 hang, 1 go wrong otherwise"):
        in_schedules(run, num=1)


def test_stamps_name_a_message_of_the_other_path() -> None:
    shared = {("prefill", "ep"): ("decode", "ep")}
    with pytest.raises(WrongDataError, match=r"decode|prefill"):
        run_stamped(alias=shared, verify=False)
