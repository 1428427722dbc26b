"""The plan as a pure function: what it promises for any proposals whatsoever."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.comm.toy import DECODE, PREFILL

from interlace.comm.path import Op, Path
from interlace.comm.plan import (
    Mode,
    PlanConfig,
    PlanState,
    Policy,
    StepPlan,
    fingerprint,
    interleave,
    plan,
)
from interlace.comm.proposal import Proposal

ROLES = {"ep": ((0, 1, 2, 3),), "tp": ((0, 1), (2, 3))}

proposals = st.builds(
    Proposal,
    rank=st.just(0),
    leader=st.just(True),
    decode_rows=st.sampled_from([0, 0, 1, 7]),
    waiting_tokens=st.sampled_from([0, 1, 2, 9]),
    waiting_steps=st.integers(0, 5),
    live_rows=st.sampled_from([0, 3, 3, 3]),
    transfer_rows=st.sampled_from([0, 0, 2]),
    idle=st.booleans(),
    stop=st.booleans(),
)
steps = st.lists(st.lists(proposals, min_size=2, max_size=2), min_size=1, max_size=15)


@st.composite
def configs(draw: st.DrawFn, mode: Mode | None = None) -> PlanConfig:
    def path(name: str) -> Path:
        roles = draw(st.lists(st.sampled_from(["ep", "tp"]), min_size=1, max_size=14))
        program = tuple(
            Op(kind="Gather", role=role, stage=str(nth)) for nth, role in enumerate(roles)
        )
        return Path(name=name, groups=ROLES, program=program, whole=name == DECODE, work=(name,))

    return PlanConfig(
        paths=(path(DECODE), path(PREFILL)),
        mode=mode or draw(st.sampled_from(["serial", "multiplexed"])),
        slots=draw(st.integers(1, 3)),
        chunk_steps=draw(st.integers(1, 5)),
        start_tokens=draw(st.integers(1, 5)),
        start_steps=draw(st.integers(1, 4)),
    )


def fold(steps: list[list[Proposal]], config: PlanConfig) -> list[tuple[PlanState, StepPlan]]:
    """Each step's plan with the state it was made from."""
    state, walked = PlanState(), []
    for leaders in steps:
        made = plan(state, leaders, config)
        walked.append((state, made))
        state = made.after
    return walked


counts = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(
    lambda numbers: [(f"path{index}", number) for index, number in enumerate(numbers)]
)


def even(counts: list[tuple[str, int]]) -> list[tuple[str, tuple[int, ...]]]:
    """All tickets with the same work before them."""
    return [(name, (3,) * num) for name, num in counts]


@given(counts)
def test_interleave_keeps_every_ticket_of_every_path(counts: list[tuple[str, int]]) -> None:
    assert Counter(interleave(even(counts))) == Counter(dict(counts))


@given(counts)
def test_interleave_has_the_documented_gap_bound(counts: list[tuple[str, int]]) -> None:
    order = interleave(even(counts))
    for one, n in counts:
        places = [at for at, name in enumerate(order) if name == one]
        for other, m in counts:
            for left, right in pairwise(places):
                assert order[left:right].count(other) <= math.ceil(m / (n + 1)) + 1 or one == other


def test_where_two_tickets_tie_the_path_named_first_goes_first() -> None:
    assert interleave(even([("a", 1), ("b", 1)])) == ["a", "b"]
    assert interleave(even([("b", 1), ("a", 1)])) == ["b", "a"]
    assert interleave(even([("a", 1), ("b", 3)])) == ["b", "a", "b", "b"]


def test_the_longer_the_work_that_leads_to_a_ticket_the_more_of_others_go_before_it() -> None:
    decode = ("d", (1,) * 12)
    assert "".join(interleave([decode, ("p", (1, 1, 1))])) == "dddpdddpdddpddd"
    assert "".join(interleave([decode, ("p", (1, 1, 10))])) == "pdpddddddddpddd"
    assert "".join(interleave([decode, ("p", (10, 1, 1))])) == "ddddddddppdpddd"


def test_only_prefill_is_spread_by_its_work() -> None:
    program = tuple(
        Op(kind="Gather", role="ep", stage=str(nth), work=work)
        for nth, work in enumerate((1, 20, 1, 20))
    )
    paths = tuple(
        Path(name=name, groups=ROLES, program=program, whole=name == DECODE, work=(name,))
        for name in (DECODE, PREFILL)
    )
    config = PlanConfig(paths=paths, mode="multiplexed", chunk_steps=1)
    leader = Proposal(rank=0, leader=True, decode_rows=1, waiting_tokens=1)
    order = "".join(ticket.path[0] for ticket in plan(PlanState(), [leader], config).tickets)
    assert order == "pddppddp"


@given(steps, configs(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_proposals(
    steps: list[list[Proposal]], config: PlanConfig, draw: random.Random
) -> None:
    for state, made in fold(steps, config):
        leaders = list(steps[made.step])
        draw.shuffle(leaders)
        assert plan(state, leaders, config) == made


@given(steps, configs())
def test_only_leaders_decide(steps: list[list[Proposal]], config: PlanConfig) -> None:
    loud = Proposal(
        rank=3, leader=False, decode_rows=99, waiting_tokens=99, waiting_steps=99, live_rows=99
    )
    for state, made in fold(steps, config):
        assert plan(state, [*steps[made.step], loud], config) == made


@given(steps, configs())
def test_sequence_numbers_are_dense_and_slots_follow_the_communicator(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    seq, path_seq, comm_seq = 0, Counter[str](), Counter[tuple[str, str]]()
    for _, made in fold(steps, config):
        for ticket in made.tickets:
            key = ticket.path, ticket.op.role
            assert ticket.seq == seq
            assert ticket.path_seq == path_seq[ticket.path]
            assert ticket.comm_seq == comm_seq[key]
            assert ticket.slot == ticket.comm_seq % config.slots
            assert ticket.step == made.step
            seq += 1
            path_seq[ticket.path] += 1
            comm_seq[key] += 1


@given(steps, configs())
def test_each_path_walks_its_program_in_order_without_gaps(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for path in config.paths:
        position = None
        for _, made in fold(steps, config):
            if path.name in made.drop:
                position = None
            if path.name in made.start:
                assert position is None
                position = 0
            for ticket in made.tickets:
                if ticket.path == path.name:
                    assert ticket.op == path.program[position]
                    position += 1
            assert (path.name in made.finish) == (position == len(path.program))
            if path.name in made.finish:
                position = None
            assert dict(made.after.position).get(path.name) == position


@given(steps, configs("multiplexed"))
def test_bounded_bypass_while_anybody_decodes(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    quota = math.ceil(len(config.paths[1].program) / config.chunk_steps)
    between = 0
    for _, made in fold(steps, config):
        if made.decoding == 0:
            between = 0
        for ticket in made.tickets:
            if ticket.path == DECODE:
                between = 0
            elif made.decoding > 0:
                between += 1
                assert between <= quota


@given(steps, configs("multiplexed"))
def test_decode_runs_whole_in_every_step_in_which_anybody_decodes(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, config):
        size = len(config.paths[0].program)
        assert made.count(DECODE) == (size if made.decoding else 0)


@given(steps, configs())
def test_a_prefill_in_flight_advances_in_every_step_and_ends_in_time(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    began = None
    for _, made in fold(steps, config):
        if PREFILL in made.drop:
            began = None
        if PREFILL in made.start:
            began = made.step
        if began is not None:
            assert made.count(PREFILL) >= 1
            assert made.step < began + config.chunk_steps
        if PREFILL in made.finish:
            began = None
        assert (began is not None) == (PREFILL in dict(made.after.position))


@given(steps, configs("serial"))
def test_serial_never_runs_both_paths_in_one_step(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, config):
        assert made.count(DECODE) == 0 or made.count(PREFILL) == 0
        assert made.after.position == ()


@given(steps, configs())
def test_a_prefill_is_dropped_exactly_when_no_leader_wants_its_rows(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for state, made in fold(steps, config):
        unwanted = all(p.live_rows == 0 for p in steps[made.step])
        in_flight = PREFILL in dict(state.position)
        assert made.drop == ((PREFILL,) if unwanted and in_flight else ())


@given(steps, configs())
def test_the_ranks_stop_only_when_all_leaders_are_idle_and_say_so(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, config):
        if made.stop:
            assert all(p.idle and p.stop for p in steps[made.step])
            assert made.tickets == made.start == made.drop == made.finish == ()
            assert made.after.position == ()
        assert bool(made.park_ms) == (not made.tickets)


def leader(rank: int = 0, **numbers: int | bool) -> Proposal:
    return Proposal(rank=rank, leader=True, **numbers)


def small(mode: Mode = "multiplexed", **changes: int) -> PlanConfig:
    program = tuple(Op(kind="Gather", role="ep", stage=str(nth)) for nth in range(6))
    paths = tuple(
        Path(name=name, groups=ROLES, program=program, whole=name == DECODE, work=(name,))
        for name in (DECODE, PREFILL)
    )
    return replace(PlanConfig(paths=paths, mode=mode), **changes)


def test_one_leader_that_is_idle_but_expects_more_keeps_everybody_running() -> None:
    done = leader(idle=True, stop=True)
    assert plan(PlanState(), [done, done], small()).stop
    assert not plan(PlanState(), [done, leader(1, idle=True, stop=False)], small()).stop
    assert not plan(PlanState(), [done, leader(1, idle=False, stop=True)], small()).stop


def test_a_few_waiting_tokens_start_a_prefill_only_once_they_have_waited() -> None:
    config = small(start_tokens=8, start_steps=4)
    young, old = (
        leader(waiting_tokens=3, waiting_steps=3),
        leader(waiting_tokens=3, waiting_steps=4),
    )
    assert plan(PlanState(), [young], config).start == ()
    assert plan(PlanState(), [old], config).start == (PREFILL,)
    assert plan(PlanState(), [leader(waiting_tokens=8)], config).start == (PREFILL,)


def test_a_prefill_runs_to_its_end_when_nobody_decodes() -> None:
    config = small(chunk_steps=3)
    first = plan(PlanState(), [leader(waiting_tokens=9, decode_rows=1)], config)
    assert first.count(PREFILL) == 2
    rest = plan(first.after, [leader(live_rows=9)], config)
    assert rest.count(PREFILL) == 4
    assert rest.finish == (PREFILL,)


def test_the_version_and_the_rows_agreed_are_on_the_ticket() -> None:
    made = plan(
        PlanState(version=3, epoch=2),
        [leader(waiting_tokens=9, decode_rows=1), leader(1, decode_rows=5)],
        small(),
    )
    assert {ticket.version for ticket in made.tickets} == {3}
    assert {ticket.epoch for ticket in made.tickets} == {2}
    assert {(ticket.path, ticket.rows) for ticket in made.tickets} == {(DECODE, 5), (PREFILL, 0)}


updating = st.lists(
    st.tuples(st.lists(proposals, min_size=2, max_size=2), st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=15,
)


@given(updating, configs())
def test_versions_change_between_steps_without_a_prefill_in_flight(
    steps: list[tuple[list[Proposal], int, int]], config: PlanConfig
) -> None:
    state = PlanState()
    for leaders, ready, readier in steps:
        brought = [replace(leaders[0], update=ready), replace(leaders[1], update=readier)]
        made = plan(state, brought, config)
        newest = min(ready, readier)
        assert made.update == (newest if newest > state.version else 0)
        assert made.after.version == max(state.version, newest)
        assert {ticket.version for ticket in made.tickets} <= {state.version}
        if made.update:
            assert made.after.position == ()
            assert not made.stop
            assert made.park_ms == 0
        state = made.after


def test_a_rank_that_is_not_ready_holds_the_update_back_even_if_it_leads_nobody() -> None:
    config = PlanConfig(paths=(), mode="multiplexed")
    leader = Proposal(rank=0, leader=True, update=1)
    follower = Proposal(rank=1, leader=False)
    assert plan(PlanState(), [leader, follower], config).update == 0
    assert plan(PlanState(), [leader, replace(follower, update=1)], config).update == 1


@given(st.lists(proposals, min_size=1, max_size=3), configs())
def test_a_fingerprint_sees_every_field_of_every_ticket(
    leaders: list[Proposal], config: PlanConfig
) -> None:
    made = plan(PlanState(), leaders, config)
    assert fingerprint(made) == fingerprint(replace(made, after=PlanState(step=9)))
    for name in ("step", "version", "decoding", "update", "park_ms", "meet_at"):
        assert fingerprint(replace(made, **{name: 77})) != fingerprint(made)
    for name in ("start", "drop", "finish"):
        assert fingerprint(replace(made, **{name: ("x",)})) != fingerprint(made)
    for at, ticket in enumerate(made.tickets[:3]):
        for name in ("epoch", "step", "seq", "path_seq", "comm_seq", "slot", "version", "rows"):
            other = replace(ticket, **{name: getattr(ticket, name) + 1})
            changed = (*made.tickets[:at], other, *made.tickets[at + 1 :])
            assert fingerprint(replace(made, tickets=changed)) != fingerprint(made)
        for changed_op in (replace(ticket.op, stage="y"), replace(ticket.op, role="y")):
            other = replace(ticket, op=changed_op)
            changed = (*made.tickets[:at], other, *made.tickets[at + 1 :])
            assert fingerprint(replace(made, tickets=changed)) != fingerprint(made)


@given(
    steps, configs(mode="multiplexed"), st.sampled_from(["plan", "turnstile"]), st.integers(1, 3)
)
def test_prefill_stops_only_behind_whole_layers_where_that_is_asked_for(
    steps: list[list[Proposal]], config: PlanConfig, policy: Policy, layers: int
) -> None:
    def layered(path: Path) -> Path:
        ops = [replace(op, stage=f"{nth // 3}.{nth}") for nth, op in enumerate(path.program)]
        return replace(path, program=tuple(ops))

    config = replace(
        config,
        paths=tuple(map(layered, config.paths)),
        policy=policy,
        layers_per_boundary=layers,
    )
    size, program = 3 * layers, config.paths[1].program
    for _, made in fold(steps, config):
        for ticket, following in pairwise(made.tickets):
            if ticket.path == PREFILL and following.path == DECODE:
                place = [op.stage for op in program].index(ticket.op.stage) + 1
                assert place % size == 0 or place == len(program)
        assert dict(made.after.position).get(PREFILL, 0) % size == 0


@given(steps, configs(mode="multiplexed"))
def test_a_turnstile_lets_decode_through_then_all_meet_then_one_boundary_of_prefill(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, replace(config, policy="turnstile")):
        names = [ticket.path for ticket in made.tickets]
        if len(set(names)) < 2:
            assert made.meet_at == 0
            continue
        assert names == [DECODE] * made.meet_at + [PREFILL] * (len(names) - made.meet_at)
        assert made.meet_at == len(config.paths[0].program)
        assert made.count(PREFILL) == 1


@given(steps, configs(mode="multiplexed"))
def test_a_global_enqueue_lets_a_whole_prefill_go_first(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, replace(config, policy="global_enqueue")):
        names = [ticket.path for ticket in made.tickets]
        assert names == sorted(names, reverse=True)
        assert made.after.position == ()
        assert made.meet_at == 0


@given(steps, configs(mode="multiplexed"))
def test_abreast_a_whole_prefill_goes_beside_decode_ticket_by_ticket(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, replace(config, policy="abreast")):
        names = [ticket.path for ticket in made.tickets]
        by_path = {name: names.count(name) for name in set(names)}
        for path in config.paths:
            assert by_path.get(path.name, 0) in (0, len(path.program))
        turns = min(by_path.values()) if len(by_path) > 1 else 0
        assert names[: 2 * turns] == [DECODE, PREFILL] * turns
        assert len(set(names[2 * turns :])) <= 1
        assert made.after.position == ()
        assert made.meet_at == 0


TRANSFER = "transfer"


@st.composite
def apart(draw: st.DrawFn) -> PlanConfig:
    """Prefill and decode on different ranks, with a transfer between them."""
    config = draw(configs("disaggregated"))
    decode, prefill = config.paths
    transfer = Path(
        name=TRANSFER,
        groups={"all": ((0, 1, 2, 3),)},
        program=tuple(Op(kind="Exchange", role="all", stage=f"{nth}") for nth in range(3)),
        whole=True,
        work=(TRANSFER,),
    )
    decode = replace(decode, groups={role: groups[-1:] for role, groups in ROLES.items()})
    prefill = replace(prefill, groups={"ep": ((0, 1),), "tp": ((0, 1),)})
    return replace(config, paths=(transfer, decode, prefill))


@given(steps, apart())
def test_a_transfer_is_whole_in_the_step_in_which_a_leader_has_something_to_send(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    for _, made in fold(steps, config):
        wanted = any(p.transfer_rows for p in steps[made.step])
        assert (TRANSFER in made.start) == (TRANSFER in made.finish) == wanted
        assert made.count(TRANSFER) == 3 * wanted
        assert TRANSFER not in dict(made.after.position)
        assert {ticket.rows for ticket in made.tickets if ticket.path == TRANSFER} <= {0}


@given(steps, apart())
def test_a_transfer_goes_first_by_turns_and_the_others_are_ordered_as_if_multiplexed(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    alone = replace(config, paths=config.paths[1:], mode="multiplexed")
    for (_, made), (_, without) in zip(fold(steps, config), fold(steps, alone), strict=True):
        names = [ticket.path for ticket in made.tickets]
        others = [name for name in names if name != TRANSFER]
        assert others == [ticket.path for ticket in without.tickets]
        places = [at for at, name in enumerate(names) if name == TRANSFER]
        assert places in ([], [nth + min(nth, len(others)) for nth in range(3)])
        assert made.drop == without.drop
        assert made.stop == (without.stop and not places)


@given(steps, apart())
def test_bounded_bypass_holds_where_prefill_is_on_other_ranks(
    steps: list[list[Proposal]], config: PlanConfig
) -> None:
    quota = math.ceil(len(config.paths[2].program) / config.chunk_steps)
    between = {PREFILL: 0, TRANSFER: 0}
    for _, made in fold(steps, config):
        assert made.count(DECODE) == (len(config.paths[1].program) if made.decoding else 0)
        for ticket in made.tickets:
            if ticket.path == DECODE or not made.decoding:
                between = dict.fromkeys(between, 0)
            else:
                between[ticket.path] += 1
                assert between[PREFILL] <= quota
                assert between[TRANSFER] <= 3


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_who_is_alone_takes_its_tickets_in_turn_without_being_spread(works: list[int]) -> None:
    assert interleave([(DECODE, works)]) == [DECODE] * len(works)
