"""Rows 40 to 42 of the catalogue: who pauses, and who has to resume."""

from __future__ import annotations

from interlace.comm.plan import StepPlan

from .bare import BareRank, run_bare
from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules, run_kernels, spin
from .stamped import BUSY, NUM_OURS, run_stamped
from .updates import step_of_update, updated


async def _pause_for_oneself(rank: BareRank) -> None:
    """Rank 0 is told to pause and does; rank 1 has just begun a wave of requests."""
    for step in range(4):
        if rank.rank == 0 and step == 2:
            return
        await rank.gather("ep", f"step {step}", [rank.rank])


def one_rank_pauses() -> Outcome:
    """A rank that was told to pause leaves; its peer has begun a step and waits."""
    return outcome_of(lambda: in_schedules(lambda seed: run_bare(_pause_for_oneself, seed=seed)))


def stopping_is_agreed() -> Outcome:
    """Rank 0 wants to stop at step 2, rank 1 works until step 5: both leave in the same step."""
    idle = {"idle": True, "stop": True}

    def run() -> str:
        plans: list[StepPlan] = []

        def one(seed: int) -> None:
            plans[:] = run_stamped(
                seed=seed,
                numbers=lambda step, rank: BUSY if step < (2, 5)[rank] else idle,
                num_steps=50,
            )

        said = in_schedules(one, num=NUM_OURS)
        if [plan.stop for plan in plans] != [False] * (len(plans) - 1) + [True]:
            raise WrongDataError(f"stops {[plan.stop for plan in plans]}")
        return f"{said}; both work on to step {plans[-1].step} and stop there"

    return outcome_of(run)


class ReadersAndWriter:
    """Requests read, an update writes; a paused request keeps its lock."""

    def __init__(self) -> None:
        self.num_readers, self.paused, self.loaded = 0, False, False

    async def request(self) -> None:
        self.num_readers += 1
        for token in range(3):
            await spin(lambda: not self.paused, f"a request at token {token} is paused")
        self.num_readers -= 1

    async def update(self) -> None:
        await spin(lambda: self.num_readers > 0, "the update waits for requests to pause")
        self.paused = True
        await spin(lambda: self.num_readers == 0, "the update waits for the lock")
        self.loaded, self.paused = True, False


def the_update_waits_for_who_waits_for_it() -> Outcome:
    """Paused requests hold a reader's lock until they resume, which is after the update."""

    def one(seed: int) -> None:
        lock = ReadersAndWriter()
        run_kernels([lock.request(), lock.request(), lock.update()], seed)

    return outcome_of(lambda: in_schedules(one))


def sequences_live_through_an_update() -> Outcome:
    """Nobody holds anything between two steps: sequences that decode go on with the new weights
    in the very next step."""

    def run() -> str:
        plans = updated(0, 4, 4)
        step = step_of_update(plans).step
        around = [(plan.version, plan.count("decode")) for plan in plans[step : step + 2]]
        if around != [(0, 3), (1, 3)]:
            raise WrongDataError(f"(version, decode tickets) around the update: {around}")
        return f"ready at step 4, installed after step {step}; decode misses no step"

    return outcome_of(run)


class Gates:
    """A gate for each loop; an update closes all of them."""

    def __init__(self) -> None:
        self.open = {"decode": True, "prefill": True}

    async def loop(self, name: str) -> None:
        for turn in range(4):
            await spin(lambda: self.open[name], f"{name} waits at its gate in turn {turn}")

    async def update(self) -> None:
        self.open = dict.fromkeys(self.open, False)
        await spin(lambda: True, "the update loads")
        self.open["decode"] = True


def resumed_on_one_path() -> Outcome:
    """An update closes the gates of both loops and opens one of them."""

    def one(seed: int) -> None:
        gates = Gates()
        run_kernels([gates.update(), *(gates.loop(name) for name in gates.open)], seed)

    return outcome_of(lambda: in_schedules(one))


def nothing_has_to_be_resumed() -> Outcome:
    """An update is a step, not a state: prefill starts again in the next one, unasked."""

    def run() -> str:
        plans = updated(0, 4, 4)
        step = step_of_update(plans).step
        behind = plans[step + 1]
        if "prefill" in plans[step].start or "prefill" not in behind.start:
            raise WrongDataError(f"step {step} starts {plans[step].start}, then {behind.start}")
        return f"prefill is held back in step {step} alone and starts in step {step + 1}"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=40,
        url="https://github.com/PrimeIntellect-ai/prime-rl/pull/2325",
        title="one rank pauses while another begins a wave of requests",
        how="in process",
        expected="hang",
        unsafe=one_rank_pauses,
        ours=stopping_is_agreed,
    ),
    Hazard(
        row=41,
        url="https://github.com/sgl-project/sglang/pull/29670",
        title="a paused request holds the lock that the update waits for",
        how="unit",
        expected="hang",
        unsafe=the_update_waits_for_who_waits_for_it,
        ours=sequences_live_through_an_update,
    ),
    Hazard(
        row=42,
        url="https://github.com/areal-project/AReaL/issues/1160",
        title="after an update one path is never resumed",
        how="unit",
        expected="hang",
        unsafe=resumed_on_one_path,
        ours=nothing_has_to_be_resumed,
    ),
)
