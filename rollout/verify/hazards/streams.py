"""Rows 36 and 38 of the catalogue: a missing event, and graphs replayed over a protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.messages import TurnRequest
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules, pause, run_kernels, spin
from .stamped import always, run_stamped

BLOCK = 4


class LazyDevice:
    """Two streams as unlucky as a device may be: prefill's work runs only once somebody waits for
    it, decode's at once."""

    def __init__(self) -> None:
        self.written: set[int] = set()
        self._prefill: list[int] = []

    def launch_prefill(self, description: Description) -> None:
        for row, position in enumerate(description.positions):
            self._prefill.append(_slot(description, row, position))

    def synchronize_prefill(self) -> None:
        self.written |= set(self._prefill)
        self._prefill.clear()

    def launch_decode(self, description: Description) -> None:
        for row, position in enumerate(description.positions):
            for at in range(position):
                if _slot(description, row, at) not in self.written:
                    raise WrongDataError(f"decode reads position {at} before prefill wrote it")
            self.written.add(_slot(description, row, position))


def _slot(description: Description, row: int, position: int) -> int:
    bounds = description.cu_seqlens_q
    sequence = next(nth for nth, stop in enumerate(bounds[1:]) if row < stop)
    return description.block_tables[sequence][position // BLOCK] * BLOCK + position % BLOCK


def _scheduler() -> Scheduler:
    scheduler = Scheduler(
        blocks=BlockManager(num_blocks=8, block_size=BLOCK),
        chunk_tokens=8,
        max_running=4,
        max_context=20,
        expert_shape=(1, 1),
        text_of=lambda _: "",
    )
    request = TurnRequest(
        trajectory=0,
        turn=0,
        token_ids=list(range(6)),
        seed=0,
        experts_from=0,
        sampling=SamplingParams(max_tokens=3),
    )
    scheduler.submit(request)
    return scheduler


def _returned(scheduler: Scheduler, work: str, description: Description) -> None:
    """The forward pass is over and its samples are on the host."""
    drawn = [Drawn(token=1, logprob_raw=0.0, logprob=0.0, ends_choice=False)]
    experts = np.zeros((description.num_rows, 1, 1), np.uint8)
    scheduler.take(work, drawn * len(description.sample_rows), experts, 0)


def merged_without_an_event() -> Outcome:
    """Prefill is merged into the decode batch as soon as it is launched."""

    def run() -> str:
        device, scheduler = LazyDevice(), _scheduler()
        prefill = scheduler.describe_prefill()
        device.launch_prefill(prefill)
        decode = replace(
            prefill,
            input_ids=(1,),
            positions=(prefill.num_rows,),
            cu_seqlens_q=(0, 1),
            sample_rows=(0,),
        )
        device.launch_decode(decode)
        return "decoded"

    return outcome_of(run)


def merged_once_its_samples_are_here() -> Outcome:
    """A sequence decodes once its first token is on the host, and then agreed: the wait for the
    token is the wait for all that prefill wrote."""

    def run() -> str:
        device, scheduler = LazyDevice(), _scheduler()
        prefill = scheduler.describe_prefill()
        device.launch_prefill(prefill)
        early = []
        for moment in ("launched", "returned"):
            decode = scheduler.describe_decode()
            early.append(decode.num_rows)
            device.launch_decode(decode)
            _returned(scheduler, "decode", decode)
            if moment == "launched":
                scheduler.commit()
                device.synchronize_prefill()
                _returned(scheduler, "prefill", prefill)
        scheduler.commit()
        device.launch_decode(scheduler.describe_decode())
        if early != [0, 0]:
            raise WrongDataError(f"decode had {early} rows before prefill was agreed")
        return "no decode row before prefill's token was agreed, then one that reads what is there"

    return outcome_of(run)


class Lamport:
    """The data is its own flag: a slot that is not empty has arrived; readers empty it."""

    def __init__(self, slots: int) -> None:
        self.inbox = [[[0, 0] for _ in range(slots)] for _ in range(2)]

    async def run(self, rank: int, slot: int, nth: int) -> int:
        for peer in range(2):
            self.inbox[peer][slot][rank] = nth
        where = f"rank {rank}: slot {slot} of replay {nth}"
        await spin(lambda: all(self.inbox[rank][slot]), where)
        await pause()
        total = sum(self.inbox[rank][slot])
        self.inbox[rank][slot] = [0, 0]
        return total


def _replays(seed: int, slot_of: Callable[[int], int]) -> None:
    protocol, replays = Lamport(slots=3), range(1, 7)

    async def rank_of(rank: int) -> list[int]:
        return [await protocol.run(rank, slot_of(nth), nth) for nth in replays]

    for sums in run_kernels([rank_of(0), rank_of(1)], seed):
        if sums != [2 * nth for nth in replays]:
            raise WrongDataError(f"sums {sums}")


def slots_baked_into_a_graph() -> Outcome:
    """A graph of one reduction: each replay uses the slot it was captured with. The same kernels
    pass where a count on the device goes round the slots."""

    def run() -> str:
        in_schedules(lambda seed: _replays(seed, lambda nth: nth % 3))
        return in_schedules(lambda seed: _replays(seed, lambda nth: 0))

    return outcome_of(run)


def slots_come_with_the_ticket() -> Outcome:
    """A decode of three collectives, an odd number, step after step: its slots keep alternating."""

    def run() -> str:
        numbers = always(waiting_tokens=0, live_rows=0)
        plans = run_stamped(numbers=numbers, window=True, num_steps=9)
        slots = [ticket.slot for plan in plans for ticket in plan.tickets]
        first = [plan.tickets[0].slot for plan in plans]
        if slots != [nth % 2 for nth in range(27)] or set(first) != {0, 1}:
            raise WrongDataError(f"slots {slots}")
        return "9 steps of one program of 3 collectives; the first one's slots are 0, 1, 0, ..."

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=36,
        url="https://github.com/sgl-project/sglang/issues/29958",
        title="decode reads what another stream has yet to write: the event is missing",
        how="unit",
        expected="wrong data",
        unsafe=merged_without_an_event,
        ours=merged_once_its_samples_are_here,
    ),
    Hazard(
        row=38,
        url="https://github.com/sgl-project/sglang/issues/38300",
        title="identical graphs are replayed over a protocol that counts (modelled without a GPU)",
        how="in process",
        expected="hang",
        unsafe=slots_baked_into_a_graph,
        ours=slots_come_with_the_ticket,
    ),
)
