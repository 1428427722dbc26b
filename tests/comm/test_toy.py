"""The toy in a LocalWorld: right numbers whatever the schedule, the mode and the layout."""

import itertools
from dataclasses import replace

import pytest
from tests.comm.toy import (
    DECODE,
    PREFILL,
    Job,
    Layout,
    Toy,
    build,
    expected,
    forward,
    local_world,
    paths_of,
    prompt_row,
    random_jobs,
    through,
)

from interlace.comm.path import Ticket
from interlace.comm.plan import Mode
from interlace.comm.sequencer import run_straight

LAYOUTS = [
    Layout(world=1),
    Layout(world=2),
    Layout(world=3),
    Layout(world=4),
    Layout(world=2, tp=2),
    Layout(world=4, tp=2),
]
MODES: tuple[Mode, ...] = ("serial", "multiplexed")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.world}x{layout.tp}")
@pytest.mark.parametrize("mode", MODES)
def test_the_toy_gives_the_right_numbers_in_any_schedule(layout: Layout, mode: Mode) -> None:
    for serial_slots in (0, 1, 2):
        for seed in range(6):
            toy = build(layout, mode, seed=seed, world={"serial_slots": serial_slots})
            toy.run()
            assert toy.world.violations == []


@pytest.mark.slow
def test_hundreds_of_schedules_of_two_ranks_give_the_same_numbers() -> None:
    jobs = random_jobs(7, Layout(world=2))
    for seed in range(80):
        toy = build(Layout(world=2), seed=seed, jobs=jobs, world={"serial_slots": seed % 3})
        toy.run()
        assert toy.world.violations == []


def test_one_seed_is_one_schedule_and_another_seed_another() -> None:
    def schedule(seed: int) -> list[list[float]]:
        jobs = random_jobs(3, Layout(world=2))
        clock = itertools.count().__next__
        toy = build(Layout(world=2), seed=seed, jobs=jobs, clock=clock)
        toy.run()
        return [[ticket.settled_at for ticket in e.sequencer.journal.tickets] for e in toy.engines]

    assert schedule(1) == schedule(1)
    assert schedule(1) != schedule(2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_members_of_a_communicator_issue_one_list_in_one_order(mode: Mode) -> None:
    for seed in range(20):
        toy = build(Layout(world=4, tp=2), mode, seed=seed)
        toy.run()
        for one, other in itertools.combinations(toy.engines, 2):
            shared = [
                [
                    ticket
                    for ticket in engine.posted
                    if {one.rank, other.rank} <= set(group_of(toy.layout, ticket, engine.rank))
                ]
                for engine in (one, other)
            ]
            assert shared[0] == shared[1]
            assert [t.seq for t in shared[0]] == sorted({t.seq for t in shared[0]})


def group_of(layout: Layout, ticket: Ticket, rank: int) -> tuple[int, ...]:
    return next(group for group in layout.groups[ticket.op.role] if rank in group)


def test_ranks_without_work_walk_the_same_plans() -> None:
    jobs = [Job(id=0, home=0, prompt=7, new=4, arrives=0)]
    toy = build(Layout(world=3), jobs=jobs)
    toy.run()
    assert toy.engines[0].plans == toy.engines[1].plans == toy.engines[2].plans
    assert toy.engines[0].posted == toy.engines[1].posted == toy.engines[2].posted


def test_multiplexing_overlaps_the_paths_and_serial_does_not() -> None:
    def mixed_steps(mode: Mode) -> int:
        toy = build(Layout(world=2), mode, seed=1)
        toy.run()
        return sum(p.count(DECODE) > 0 and p.count(PREFILL) > 0 for p in toy.engines[0].plans)

    assert mixed_steps("multiplexed") > 0
    assert mixed_steps("serial") == 0


def unwanted_prefill(layout: Layout) -> Toy:
    """Job 1 is aborted on its rank while its prefill spans steps of job 0's decode."""
    jobs = [
        Job(id=0, home=0, prompt=3, new=12, arrives=0),
        Job(id=1, home=layout.num_homes - 1, prompt=4, new=3, arrives=4, aborted_at=6),
        Job(id=2, home=0, prompt=5, new=2, arrives=9),
    ]
    return build(layout, jobs=jobs, chunk_steps=6, seed=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.world}x{layout.tp}")
def test_a_prefill_nobody_wants_is_dropped_on_all_ranks_and_later_ones_are_right(
    layout: Layout,
) -> None:
    toy = unwanted_prefill(layout)
    toy.run()
    assert {engine.scheduler.num_dropped for engine in toy.engines} == {1}
    assert toy.world.violations == []
    assert not any(engine.scheduler.tokens.get(1) for engine in toy.engines)


@pytest.mark.slow
def test_aborts_at_any_step_leave_the_other_jobs_numbers_alone() -> None:
    for seed in range(60):
        layout = (Layout(world=2), Layout(world=4, tp=2))[seed % 2]
        jobs = [
            replace(job, aborted_at=job.arrives + seed % 7 if job.id % 2 else None)
            for job in random_jobs(seed, layout)
        ]
        toy = build(layout, seed=seed, jobs=jobs, chunk_steps=6)
        toy.run()
        assert toy.world.violations == []
        for engine in toy.engines:
            for job in jobs:
                tokens = engine.scheduler.tokens.get(job.id, [])
                assert tokens == expected(layout, job)[: len(tokens)]


def test_a_forward_pass_alone_computes_what_the_direct_formula_says() -> None:
    layout, world = Layout(world=1), local_world(1)
    rows = [prompt_row(Job(id=0, home=0, prompt=9, new=1, arrives=0), at) for at in range(9)]
    values = run_straight(forward(layout, 0, rows), {"ep": world.communicator("ep", (0,), 0)})
    assert values == [through(layout, row) for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.world}x{layout.tp}")
def test_the_program_of_the_empty_batch_is_the_one_a_batch_with_rows_walks(layout: Layout) -> None:
    toy = build(layout, seed=5)
    toy.run()
    posted = toy.engines[-1].posted
    for path in paths_of(layout):
        ops = [ticket.op for ticket in posted if ticket.path == path.name]
        passes, rest = divmod(len(ops), len(path.program))
        assert passes > 1
        assert rest == 0
        assert tuple(ops) == path.program * passes
