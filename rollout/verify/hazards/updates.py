"""Rows 39 and 43 of the catalogue: weights and experts change while ranks run."""

from __future__ import annotations

from typing import Any

from interlace.comm.collectives import Gather, perform
from interlace.comm.path import Path
from interlace.comm.plan import StepPlan
from interlace.moe.placement import Placement

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules
from .stamped import BUSY, NUM_OURS, Stamp, run_stamped

RANKS = (0, 1)


class SharedWeights:
    """The version each rank computes with; a forward pass looks in every layer."""

    def __init__(self) -> None:
        self.version = [0 for _ in RANKS]
        self.passes = set[tuple[int, int]]()
        """(version the plan said, version computed with) of every pass that ended."""

    async def forward(self, path: Path, rank: int, stamp: Stamp) -> None:
        seen = []
        for index, op in enumerate(path.program):
            seen.append(self.version[rank])
            payload = stamp.message(path.name, index, rank)
            await perform(Gather(role=op.role, stage=op.stage, payload=payload))
        if len(set(seen)) > 1:
            raise WrongDataError(f"rank {rank}: layers of one {path.name} saw versions {seen}")
        self.passes.add((stamp.version, seen[0]))


def _ready_from(*steps: int) -> Any:
    """Busy ranks; rank r holds version 1 from step ``steps[r]`` on."""
    return lambda step, rank: {**BUSY, "update": int(step >= steps[rank])}


def written_under_a_forward_pass() -> Outcome:
    """The weights change in place after step 3, whatever is in flight."""

    def one(seed: int) -> None:
        weights = SharedWeights()

        def install(step: int, rank: int, version: int) -> None:
            if step == 3:
                weights.version[rank] = 1

        run_stamped(seed=seed, forward=weights.forward, install=install)

    return outcome_of(lambda: in_schedules(one, num=NUM_OURS))


def updated(seed: int, *ready: int) -> list[StepPlan]:
    weights = SharedWeights()

    def install(step: int, rank: int, version: int) -> None:
        weights.version[rank] = version or weights.version[rank]

    plans = run_stamped(
        seed=seed,
        numbers=_ready_from(*ready),
        forward=weights.forward,
        install=install,
        num_steps=10,
        window=True,
    )
    if weights.passes != {(0, 0), (1, 1)}:
        raise WrongDataError(f"(version agreed, version seen): {weights.passes}")
    return plans


def step_of_update(plans: list[StepPlan]) -> StepPlan:
    updates = [plan for plan in plans if plan.update]
    if len(updates) != 1 or plans[-1].version != 1:
        raise WrongDataError(f"{len(updates)} updates, the last step runs {plans[-1].version}")
    return updates[0]


def installed_between_forward_passes() -> Outcome:
    """The deciding step ends the prefill in flight; every pass sees one version in all layers."""

    def run() -> str:
        said = in_schedules(lambda seed: updated(seed, 4, 4), num=NUM_OURS)
        update = step_of_update(updated(0, 4, 4))
        if dict(update.after.position):
            raise WrongDataError(f"in flight over the update: {update.after.position}")
        return f"{said}; step {update.step} issues all that was left of prefill, then installs"

    return outcome_of(run)


def reloaded_into_old_places() -> Outcome:
    """Experts have moved; a reload writes each where it was in the beginning."""

    def run() -> str:
        initial = Placement(owners=(0, 1), ep_size=2)
        moved = Placement(owners=(1, 0), ep_size=2)
        slots = {moved.owners[expert]: f"expert {expert} v0" for expert in range(2)}
        for expert in range(2):
            slots[initial.owners[expert]] = f"expert {expert} v1"
        found = slots[moved.owners[0]]
        if found != "expert 0 v1":
            raise WrongDataError(f"rows for expert 0 are computed by {found}")
        return found

    return outcome_of(run)


def one_step_moves_all_ranks() -> Outcome:
    """Ranks are ready at different steps; placement and weights change together, on all ranks
    between the same two steps, and every gather finds the same placement everywhere."""
    placements = (Placement(owners=(0, 1), ep_size=2), Placement(owners=(1, 0), ep_size=2))

    def one(seed: int, installed: dict[int, int]) -> None:
        held = [0 for _ in RANKS]

        async def forward(path: Path, rank: int, stamp: Stamp) -> None:
            for op in path.program:
                payload = bytes([held[rank], *placements[held[rank]].owners])
                answers = await perform(Gather(role=op.role, stage=op.stage, payload=payload))
                if {bytes(answer) for answer in answers} != {payload}:
                    raise WrongDataError(f"rank {rank} has {payload.hex()}, others {answers}")

        def install(step: int, rank: int, version: int) -> None:
            if version:
                held[rank] = version
                installed[rank] = step

        run_stamped(
            seed=seed,
            numbers=_ready_from(2, 5),
            forward=forward,
            install=install,
            window=True,
        )

    def run() -> str:
        installed: dict[int, int] = {}
        said = in_schedules(lambda seed: one(seed, installed), num=NUM_OURS)
        if installed != {0: 5, 1: 5}:
            raise WrongDataError(f"installed in steps {installed}")
        return f"ready at steps 2 and 5, installed after step 5 on both; {said}"

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=39,
        url="https://github.com/vllm-project/vime/pull/168",
        title="weights are written while a forward pass is in flight",
        how="in process",
        expected="wrong data",
        unsafe=written_under_a_forward_pass,
        ours=installed_between_forward_passes,
    ),
    Hazard(
        row=43,
        url="https://github.com/PrimeIntellect-ai/prime-rl/pull/3583",
        title="weights are reloaded into places that experts have left",
        how="in process",
        expected="wrong data",
        unsafe=reloaded_into_old_places,
        ours=one_step_moves_all_ranks,
    ),
)
