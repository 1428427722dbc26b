"""Every rule has a mutant that breaks it: the unsafe way hangs, corrupts or is refused; ours never.

Each control runs the toy under many seeds and counts how the runs ended. `hang` is a
DeadlockError, `wrong` a wrong number, `diverged` a DivergedError, `refused` an OrderError. Run with
``-s`` to see the counts.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.comm.toy import DECODE, PREFILL, Engine, Job, Layout, Mutate, Recording, Toy, build

from interlace.comm.agreement import Agreement, agree
from interlace.comm.collectives import Collective
from interlace.comm.communicator import Communicator
from interlace.comm.errors import DivergedError
from interlace.comm.path import Ticket
from interlace.comm.plan import PlanConfig, PlanState, StepPlan, plan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer

pytestmark = pytest.mark.slow

SEEDS = 80
PAIR, SQUARE = Layout(world=2), Layout(world=4, tp=2)
SHARED = {(PREFILL, "ep"): (DECODE, "ep"), (PREFILL, "tp"): (DECODE, "tp")}


def count(what: str, make: Callable[[int], Toy], seeds: int = SEEDS) -> Counter[str]:
    """How many runs ended in which way; overwritten unread messages are counted beside them."""
    ended = Counter[str]()
    for seed in range(seeds):
        toy = make(seed)
        ended[toy.outcome()] += 1
        ended["overwrites"] += bool(toy.world.violations)
    print(f"{what}: {dict(+ended)}")
    return +ended


@pytest.mark.parametrize("layout", [PAIR, SQUARE], ids=["2", "2x2"])
@pytest.mark.parametrize("serial_slots", [0, 1, 2])
def test_own_state_and_one_order_are_right_in_every_schedule(
    layout: Layout, serial_slots: int
) -> None:
    ended = count(
        f"ours, serial_slots {serial_slots}",
        lambda seed: build(layout, seed=seed, world={"serial_slots": serial_slots}),
        seeds=40,
    )
    assert ended == {"right": 40}


# (a) isolation


def test_paths_that_share_a_communicators_state_read_each_others_messages() -> None:
    unsafe: dict[str, Any] = {"alias": SHARED, "verify": False}
    ended = count("(a) shared state", lambda seed: build(PAIR, seed=seed, world=unsafe))
    assert ended["right"] == 0
    assert ended["wrong"] > 0
    assert ended["hang"] > 0


def test_the_header_names_a_message_of_the_other_path_before_it_is_used() -> None:
    ended = count("(a) with header", lambda seed: build(PAIR, seed=seed, world={"alias": SHARED}))
    assert ended["wrong"] == ended["right"] == 0
    assert ended["diverged"] > 0
    with pytest.raises(DivergedError) as caught:
        build(PAIR, seed=0, world={"alias": SHARED}).run()
    wanted, found = str(caught.value).split("; slot")
    assert {PREFILL in wanted, PREFILL in found} == {True, False}
    assert {DECODE + "/ep" in wanted, DECODE + "/ep" in found} == {True, False}


class Implicit(Recording):
    """Counts its own posts to choose a slot, as a library with hidden state does."""

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        return self.inner.post(request, None)


def one_for_both(own: Mapping[Any, Communicator]) -> Mapping[Any, Communicator]:
    shared = {role: Implicit(own[DECODE, role], []) for _, role in own}
    return {(name, role): shared[role] for name, role in own}


def one_for_each(own: Mapping[Any, Communicator]) -> Mapping[Any, Communicator]:
    return {key: Implicit(communicator, []) for key, communicator in own.items()}


def test_implicit_slots_of_a_communicator_shared_by_both_paths_lose_messages() -> None:
    unsafe = {"verify": False}
    ended = count(
        "(a) shared, implicit slots",
        lambda seed: build(PAIR, seed=seed, wrap=one_for_both, world=unsafe),
    )
    assert ended["wrong"] + ended["hang"] > 0
    assert ended["overwrites"] > 0
    alone = count(
        "(a) separate, implicit slots",
        lambda seed: build(PAIR, seed=seed, wrap=one_for_each, world=unsafe),
        seeds=60,
    )
    assert alone == {"right": 60}


# (b) order


def swapped(tickets: tuple[Ticket, ...], at: int) -> tuple[Ticket, ...]:
    """Two neighbours change places; numbered anew, so that the local check sees nothing odd."""
    one, two = tickets[at : at + 2]
    return (
        *tickets[:at],
        replace(two, seq=one.seq),
        replace(one, seq=two.seq),
        *tickets[at + 2 :],
    )


def seams(tickets: tuple[Ticket, ...]) -> list[int]:
    return [at for at in range(len(tickets) - 1) if tickets[at].path != tickets[at + 1].path]


def swap_on_the_last_rank(engine: Engine, plan: StepPlan) -> StepPlan:
    places = seams(plan.tickets)
    if engine.rank != engine.layout.world - 1 or not places:
        return plan
    at = random.Random(plan.step).choice(places)
    return replace(plan, tickets=swapped(plan.tickets, at))


def reordered(seed: int, serial_slots: int, with_hashes: bool, layout: Layout = PAIR) -> Toy:
    return build(
        layout,
        seed=seed,
        mutate=swap_on_the_last_rank,
        with_hashes=with_hashes,
        world={"serial_slots": serial_slots},
    )


@pytest.mark.parametrize("layout", [PAIR, SQUARE], ids=["2", "2x2"])
def test_one_rank_in_another_order_hangs_on_a_serial_device(layout: Layout) -> None:
    ended = count("(b) other order, serial device", lambda s: reordered(s, 1, False, layout))
    assert ended["hang"] == SEEDS


def test_without_a_serial_device_another_order_passes_unseen() -> None:
    """Why green tests over gloo prove nothing about order: gloo forgives it, NCCL does not."""
    assert count("(b) other order, forgiving", lambda s: reordered(s, 0, False), 60)["right"] == 60
    assert count("(b) other order, 2 at once", lambda s: reordered(s, 2, False), 60)["right"] == 60


def test_the_hashes_see_another_order_even_where_the_device_forgives_it() -> None:
    ended = count("(b) other order, forgiving, hashes", lambda s: reordered(s, 0, True))
    assert ended["diverged"] == SEEDS


# (c) participation


def without(plan: StepPlan, path: str) -> StepPlan:
    return replace(
        plan,
        start=tuple(name for name in plan.start if name != path),
        tickets=tuple(ticket for ticket in plan.tickets if ticket.path != path),
        finish=tuple(name for name in plan.finish if name != path),
    )


def skip_when_idle() -> Mutate:
    """Starts and walks a prefill only with rows of its own."""
    idle = set[int]()

    def mutate(engine: Engine, plan: StepPlan) -> StepPlan:
        if PREFILL in plan.start:
            (idle.discard if engine.scheduler.waiting else idle.add)(engine.rank)
        return without(plan, PREFILL) if engine.rank in idle else plan

    return mutate


@pytest.mark.parametrize("layout", [PAIR, SQUARE], ids=["2", "2x2"])
def test_an_idle_rank_that_skips_a_collective_hangs_the_others(layout: Layout) -> None:
    ended = count(
        "(c) idle rank skips",
        lambda seed: build(layout, seed=seed, mutate=skip_when_idle(), with_hashes=False),
    )
    assert ended["hang"] >= 0.9 * SEEDS
    assert ended["hang"] + ended["right"] == SEEDS  # right: nobody happened to be idle


# (d) slots


def slot_by_path(engine: Engine, plan: StepPlan) -> StepPlan:
    slots = engine.config.slots
    tickets = tuple(replace(t, slot=t.path_seq % slots) for t in plan.tickets)
    return replace(plan, tickets=tickets)


def test_slots_counted_per_path_overwrite_unread_messages_once_there_are_two_roles() -> None:
    def mutant(seed: int, layout: Layout, verify: bool) -> Toy:
        return build(layout, seed=seed, mutate=slot_by_path, world={"verify": verify})

    ended = count("(d) slot per path, 2x2", lambda seed: mutant(seed, SQUARE, False), 100)
    assert ended["overwrites"] > 0
    assert ended["wrong"] + ended["hang"] > 0
    seen = count("(d) slot per path, 2x2, header", lambda seed: mutant(seed, SQUARE, True), 100)
    assert seen["diverged"] > 0
    assert seen["wrong"] == 0
    one_role = count("(d) slot per path, one role", lambda seed: mutant(seed, PAIR, False), 60)
    assert one_role == {"right": 60}


# (e) agreement


async def agree_with_oneself(
    control: Communicator, state: PlanState, proposal: Proposal, config: PlanConfig, keys: Any
) -> Agreement:
    """No exchange: each rank plans from its own numbers."""
    return Agreement(plan=plan(state, [proposal], config), num_bytes=0)


@pytest.mark.parametrize("serial_slots", [0, 1])
def test_an_order_decided_from_local_numbers_does_not_survive(serial_slots: int) -> None:
    ended = count(
        f"(e) local numbers, serial_slots {serial_slots}",
        lambda seed: build(
            PAIR, seed=seed, agree=agree_with_oneself, world={"serial_slots": serial_slots}
        ),
    )
    assert ended["right"] <= 0.05 * SEEDS
    assert ended["hang"] > 0


async def agree_in_vain(
    control: Communicator, state: PlanState, proposal: Proposal, config: PlanConfig, keys: Any
) -> Agreement:
    """The exchange takes place and hashes are compared, but the plan is made of local numbers."""
    agreed = await agree(control, state, proposal, config, keys)
    return replace(agreed, plan=plan(state, [proposal], config))


def test_the_exchange_finds_plans_made_from_local_numbers_even_where_they_do_not_hang() -> None:
    """Both ranks decode, one two rows and one a single row: the same collectives, other plans."""
    jobs = [
        Job(id=0, home=0, prompt=2, new=5, arrives=0),
        Job(id=1, home=0, prompt=2, new=5, arrives=0),
        Job(id=2, home=1, prompt=4, new=5, arrives=0),
    ]
    ended = count(
        "(e) local numbers, hashes",
        lambda seed: build(PAIR, seed=seed, jobs=jobs, agree=agree_in_vain),
    )
    assert ended["diverged"] == SEEDS


# (g) verification


class Swapping(Sequencer):
    """Hashes the agreed plan and then issues two neighbours of it the other way round."""

    async def walk(self, plan: StepPlan, started: Mapping[str, Any]) -> dict[str, Any]:
        self.instead: dict[int, Ticket] = {}
        places = seams(plan.tickets)
        if self.rank == 1 and places:
            changed = swapped(plan.tickets, places[0])
            self.instead = {ticket.seq: ticket for ticket in changed}
        return await super().walk(plan, started)

    async def _issue(self, ticket: Ticket) -> None:
        await super()._issue(self.instead.get(ticket.seq, ticket))


def test_a_swap_beneath_the_plan_is_found_by_the_hashes_in_the_next_exchange() -> None:
    for seed in range(20):
        toy = build(PAIR, seed=seed, sequencer=Swapping)
        with pytest.raises(
            DivergedError,
            match=r"rank \d: exchange of epoch 0 step \d+: the tickets issued on decode/ep differ: "
            r"rank 0 [0-9a-f]{8}, rank 1 [0-9a-f]{8}",
        ):
            toy.run()
        zero, one = toy.engines
        assert zero.sequencer.hashes[-1] == one.sequencer.hashes[-1]  # the plans' hash is blind
        first = next(plan.step for plan in zero.plans if seams(plan.tickets))
        assert [p.step for p in zero.plans][-1] == first


def test_hashes_of_each_communicator_without_the_global_seq_would_be_blind_to_a_swap() -> None:
    """Rule 1 is broken, yet each communicator on its own looks the same on both ranks."""
    for seed in range(50):
        toy = build(PAIR, seed=seed, sequencer=Swapping, with_hashes=False)
        toy.run()
        zero, one = (hashes_without_seq(engine) for engine in toy.engines)
        assert zero == one
        assert toy.engines[0].sequencer.hashes != toy.engines[1].sequencer.hashes


def hashes_without_seq(engine: Engine) -> dict[tuple[str, str], int]:
    hashes: dict[tuple[str, str], int] = {}
    for ticket in engine.posted:
        key = ticket.path, ticket.op.role
        fields = ticket.epoch, ticket.comm_seq, ticket.op.stage, ticket.version
        hashes[key] = zlib.crc32(repr(fields).encode(), hashes.get(key, 0))
    return hashes
