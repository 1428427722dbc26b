"""A pass goes through its tickets in one call where nobody is in between, else one by one."""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from tests.comm.stretching import (
    BOTH,
    CONFIG,
    DECODES,
    PATHS,
    PREFILLS,
    PROGRAM,
    STAGES,
    Rank,
    made,
    never,
    straight,
)
from tests.comm.toy import DECODE, PREFILL, local_world
from tests.comm.windows_in_memory import NoWaiter, channel

from interlace.comm import window_layout as at
from interlace.comm.collectives import Exchange, Stretch, perform, preemption_point
from interlace.comm.driver import run_blocking
from interlace.comm.errors import CollectiveTimeoutError, OrderError
from interlace.comm.link import Link, LinkModel
from interlace.comm.path import Ticket
from interlace.comm.plan import PlanState
from interlace.comm.post_order import PostOrder
from interlace.comm.sequencer import record_program, run_straight


def test_a_pass_that_is_alone_goes_through_all_its_tickets_in_one_call() -> None:
    for name, proposal in ((DECODE, DECODES), (PREFILL, PREFILLS)):
        rank, step = Rank(), made(proposal)
        outputs = rank.walk(step, **{name: straight()})
        assert outputs == {name: ["straight", [f"{name} {stage}" for stage in STAGES]]}
        assert rank.crossed == [[0, 1, 2]]
        assert rank.posted == list(step.tickets)


def test_the_passes_of_steps_in_a_row_go_straight_one_by_one() -> None:
    rank, state = Rank(), PlanState()
    for nth in range(3):
        step = made(state=state)
        rank.walk(step, decode=straight())
        assert rank.crossed[nth] == [3 * nth, 3 * nth + 1, 3 * nth + 2]
        state = step.after


def walked(rank: Rank) -> list[dict[str, Any]]:
    """What comes of passes of one path, alone and beside one of the other."""
    state, outputs = PlanState(), []
    for proposal in (DECODES, PREFILLS, BOTH, replace(DECODES, live_rows=1), DECODES, DECODES):
        step = made(proposal, state)
        outputs.append(rank.walk(step, **{name: straight() for name in step.start}))
        state = step.after
    return outputs


def test_tickets_hashes_and_the_journal_are_those_of_single_messages() -> None:
    some, none = Rank(), Rank(cross=())
    walked(some)
    walked(none)
    assert [len(tickets) for tickets in some.crossed] == [3, 3, 3, 3]
    assert not none.crossings
    assert some.posted == none.posted
    assert some.sequencer.hashes == none.sequencer.hashes
    alike = ("step", "seq", "path", "role", "stage", "comm_seq", "members")
    noted = [
        [[getattr(t, name) for name in alike] for t in rank.sequencer.journal.tickets]
        for rank in (some, none)
    ]
    assert sorted(noted[0]) == sorted(noted[1])


def test_a_communicators_hash_sees_every_number_and_all_at_once_as_one_by_one() -> None:
    def noted(*groups: tuple[Ticket, ...]) -> tuple[int, ...]:
        sequencer = Rank().sequencer
        for tickets in groups:
            sequencer._note(*tickets)
        return sequencer.hashes

    one, two, three = made().tickets
    together = noted((one, two, three))
    assert together == noted((one,), (two,), (three,)) == noted((one,), (two, three))
    assert together != noted((one, three, two))
    assert together != noted((one, two))
    for name in ("epoch", "comm_seq", "seq", "version"):
        other = replace(two, **{name: getattr(two, name) + 1})
        assert noted((one, other, three)) != together, name
    assert noted((one, replace(two, op=replace(two.op, stage="x")), three)) != together


@pytest.mark.parametrize(
    ("mode", "policy", "crossed"),
    [
        ("multiplexed", "plan", []),
        ("multiplexed", "turnstile", [[0, 1, 2]]),
        ("multiplexed", "global_enqueue", [[0, 1, 2], [3, 4, 5]]),
        ("whole_forward", "plan", [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_a_pass_with_another_in_between_or_in_flight_goes_one_by_one(
    mode: Any, policy: Any, crossed: list[list[int]]
) -> None:
    config = replace(CONFIG, mode=mode, policy=policy)
    rank = Rank(meeting=local_world(1).communicator("meeting", (0,), 0))
    step = made(BOTH, config=config)
    outputs = rank.walk(step, decode=straight(), prefill=straight())
    assert rank.posted == list(step.tickets)
    assert rank.crossed == crossed
    assert set(outputs) == set(step.finish)


def test_a_pass_that_began_in_another_step_goes_one_by_one() -> None:
    rank, step = Rank(), made(PREFILLS)
    rank.walk(replace(step, tickets=(), finish=()), prefill=straight())
    assert rank.walk(replace(step, start=())) == {PREFILL: [["counts"], ["dispatch"], ["combine"]]}
    assert rank.crossings == []
    assert rank.posted == list(step.tickets)


def test_a_meeting_in_between_and_a_program_cut_short_are_not_crossed() -> None:
    for change in ({"meet_at": 1}, {"meet_at": 2}):
        rank = Rank(meeting=local_world(1).communicator("meeting", (0,), 0))
        rank.walk(replace(made(), **change), decode=straight())
        assert rank.crossings == []
        assert len(rank.posted) == 3
    rank, step = Rank(), made()
    rank.walk(replace(step, tickets=step.tickets[:2], finish=()), decode=straight())
    assert rank.crossings == []
    assert len(rank.posted) == 2


def test_a_meeting_before_and_behind_a_pass_is_none_in_between() -> None:
    step = made()
    later = replace(step.tickets[0], seq=3, path_seq=3, comm_seq=3, slot=1)
    rank = Rank(meeting=local_world(1).communicator("meeting", (0,), 0))
    twice = replace(step, tickets=(*step.tickets, later), meet_at=3)

    async def more() -> Any:
        return await straight(), await straight(STAGES[:1])

    outputs = rank.walk(twice, decode=more())
    assert rank.crossed == [[0, 1, 2]]
    assert outputs[DECODE][1] == [["counts"]]


def test_a_path_without_crossings_and_each_that_is_compared_first_go_one_by_one() -> None:
    before = {
        (name, "ep"): local_world(1).communicator(name, (0,), 0) for name in (DECODE, PREFILL)
    }
    for rank in (Rank(cross=()), Rank(cross=(PREFILL,)), Rank(prechecks=before)):
        outputs = rank.walk(made(), decode=straight())
        assert outputs == {DECODE: [["counts"], ["dispatch"], ["combine"]]}
        assert rank.crossings == []


def test_ranks_outside_a_path_skip_its_stretches() -> None:
    rank = Rank(paths=tuple(replace(path, groups={"ep": ((1,),)}) for path in PATHS))
    assert rank.walk(made()) == {}


def test_a_pass_that_stops_elsewhere_first_goes_one_by_one() -> None:
    async def stops() -> Any:
        await preemption_point()
        return await straight()

    rank = Rank()
    assert rank.walk(made(), decode=stops()) == {DECODE: [["counts"], ["dispatch"], ["combine"]]}
    assert rank.crossings == []


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"stages": ("counts", "elsewhere", "combine")}, "seq 1 .*: .* asks for Exchange ep elsew"),
        ({"role": "tp"}, "seq 0 decode/ep counts: the forward pass asks for Exchange tp counts"),
    ],
)
def test_stages_that_are_not_the_tickets_are_refused_and_nothing_is_posted(
    changes: dict[str, Any], asked: str
) -> None:
    rank = Rank()
    with pytest.raises(OrderError, match=asked):
        rank.walk(made(), decode=straight(**changes))
    assert rank.crossings == []
    assert rank.posted == []


@pytest.mark.parametrize(
    ("nth", "changes", "words"),
    [
        (1, {"op": replace(PROGRAM[1], kind="Gather")}, "asks for Exchange ep dispatch"),
        (2, {"seq": 1}, "seq 1 decode/ep combine: comes after seq 1"),
        (0, {"seq": -1}, "seq -1 decode/ep counts: comes after seq -1"),
    ],
)
def test_tickets_that_a_stretch_may_not_have_are_refused_and_nothing_is_posted(
    nth: int, changes: dict[str, Any], words: str
) -> None:
    rank, step = Rank(), made()
    tickets = list(step.tickets)
    tickets[nth] = replace(tickets[nth], **changes)
    with pytest.raises(OrderError, match=words):
        rank.walk(replace(step, tickets=tuple(tickets)), decode=straight())
    assert rank.crossings == []
    assert rank.posted == []


def test_a_pass_that_leaves_its_stretch_is_refused() -> None:
    rank = Rank()
    with pytest.raises(OrderError, match=r"seq 2 .* the forward pass left its stretch"):
        rank.walk(made(), decode=straight(num=2))


def test_what_comes_after_a_stretch_is_posted_as_ever() -> None:
    step = made()
    more = replace(
        step.tickets[0],
        seq=3,
        path_seq=3,
        comm_seq=3,
        slot=1,
        op=replace(PROGRAM[0], stage="final"),
    )

    async def goes_on() -> Any:
        await straight()
        await preemption_point()
        return await perform(Exchange(role="ep", stage="final", payload=[7], send=(1,), recv=(1,)))

    rank = Rank()
    outputs = rank.walk(replace(step, tickets=(*step.tickets, more)), decode=goes_on())
    assert outputs == {DECODE: [7]}
    assert rank.crossed == [[0, 1, 2]]
    last = rank.sequencer.journal.tickets[-1]
    assert (last.seq, last.stage) == (3, "final")
    assert last.resumed_at == rank.crossings[0].moments()[-1][3]


def test_records_of_a_stretch_say_when_each_message_was_made_posted_and_settled() -> None:
    rank = Rank()
    rank.late = {1: 3}
    rank.walk(made(), decode=straight())
    tickets = rank.sequencer.journal.tickets
    assert len(tickets) == 3
    for ticket in tickets:
        assert ticket.resumed_at < ticket.computed_at < ticket.posted_at < ticket.settled_at
        assert ticket.members == (0,)
    assert all(a.settled_at < b.computed_at for a, b in itertools.pairwise(tickets))
    assert tickets[0].resumed_at < rank.crossings[0].moments()[0][0]
    waits = [moment[4] for moment in rank.crossings[0].moments()]
    assert [ticket.waited_s for ticket in tickets] == waits
    assert rank.sequencer.waited_s == sum(waits) > 0


def test_a_message_that_is_late_is_waited_for_and_progress_says_which() -> None:
    rank = Rank()
    rank.late = {1: 3}
    walk = rank.sequencer.walk(made(), {DECODE: straight()})
    request = walk.send(None)
    assert request.communicator is rank.crossings[0]
    assert request.handle is None
    assert str(request.where) == "rank 0: epoch 0 step 0 seq 1 decode/ep dispatch"
    assert rank.progress.told == [("computing", 0), ("computing", 1), ("posted", 1)]
    while not request.communicator.poll(request.handle):
        pass
    with pytest.raises(StopIteration) as stop:
        walk.send(request.communicator.result(request.handle))
    assert stop.value.value[DECODE][0] == "straight"
    assert rank.progress.told[3:] == [("crossed", 0, 1, 2, 3)]


def test_a_message_that_never_comes_ends_in_a_timeout_that_names_it_and_closes_the_pass() -> None:
    closed = []

    async def watched() -> Any:
        try:
            return await straight()
        finally:
            closed.append(True)

    rank, seconds = Rank(), itertools.count()
    rank.late = {2: 1000}
    walk = rank.sequencer.walk(made(), {DECODE: watched()})
    words = "no answer within 5 s: rank 0: epoch 0 step 0 seq 2 decode/ep combine"
    with pytest.raises(CollectiveTimeoutError, match=words):
        run_blocking(walk, park=never, waiter=NoWaiter(), clock=lambda: float(next(seconds)))
    assert rank.crossings[0].num_asked > 5
    walk.close()
    rank.sequencer.close()
    assert closed == [True]


def test_a_failure_inside_a_stretch_comes_out_as_it_is() -> None:
    async def broken() -> None:
        await perform(Stretch(stages=STAGES, role="ep"))
        raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError, match="inside"):
        Rank().walk(made(), decode=broken())


def test_a_pass_that_went_straight_ahead_of_its_step_can_be_dropped() -> None:
    rank, step = Rank(), made(PREFILLS)
    rank.walk(replace(step, finish=()), prefill=straight())
    assert rank.crossed == [[0, 1, 2]]
    again = made(PREFILLS, step.after)
    outputs = rank.walk(replace(again, drop=(PREFILL,)), prefill=straight())
    assert outputs[PREFILL][0] == "straight"
    assert rank.crossed == [[0, 1, 2], [3, 4, 5]]


def test_a_program_with_a_stretch_is_recorded_and_driven_alone_message_by_message() -> None:
    assert record_program(straight(), {"ep": 1}, lambda request, size: request.payload) == PROGRAM
    (end,) = [local_world(1).communicator(("alone", "ep"), (0,), 0)]
    assert run_straight(straight(), {"ep": end}) == [["counts"], ["dispatch"], ["combine"]]


# ---- the witness


def test_the_witness_admits_what_is_crossed_in_order_and_what_comes_after_it() -> None:
    posts, (one, two, three) = PostOrder(0), made().tickets
    posts.admit_all(DECODE, "ep", (one, two), (one, two))
    request = Exchange(role="ep", stage="combine", payload=[], send=(0,), recv=(0,))
    with pytest.raises(OrderError, match=r"seq 1 .* comes after .* seq 1"):
        posts.admit(DECODE, "ep", request, two)
    posts.admit(DECODE, "ep", request, three)
    with pytest.raises(OrderError, match=r"seq 0 decode/ep counts comes after .* seq 2 "):
        posts.admit_all(DECODE, "ep", (one,), (one,))


@pytest.mark.parametrize(
    ("nth", "changes", "words"),
    [
        (0, {"path": PREFILL}, "this is the communicator of decode/ep"),
        (2, {"path": PREFILL}, "this is the communicator of decode/ep"),
        (1, {"op": replace(PROGRAM[1], role="tp")}, "this is the communicator of decode/ep"),
        (1, {"epoch": 4}, "these are the communicators of epoch 0"),
        (2, {"seq": 1}, "comes after .* seq 1 decode/ep dispatch"),
    ],
)
def test_the_witness_refuses_a_crossing_with_a_ticket_that_is_not_next(
    nth: int, changes: dict[str, Any], words: str
) -> None:
    tickets = list(made().tickets)
    tickets[nth] = replace(tickets[nth], **changes)
    with pytest.raises(OrderError, match=f"^rank 2: .*{words}"):
        PostOrder(2).admit_all(DECODE, "ep", tickets, tickets)


def test_a_channel_asks_the_witness_and_packs_what_all_headers_must_say() -> None:
    made_of: list[bytes] = []

    def crosses(window: Any, messages: bytes) -> Any:
        made_of.append(messages)

    one, two, three = made().tickets
    ends = channel(None, 0, (0,), posts=PostOrder(0), crosses=crosses)
    assert ends.can_cross
    with pytest.raises(OrderError, match="seq 0 decode/ep counts comes after"):
        ends.cross((two, one), (two, one))
    assert made_of == []
    assert ends.cross((three,), (three,)).timeout_s == 5.0
    crc = zlib.crc32(b"combine")
    assert made_of == [struct.pack("<qqqqII", 0, 2, 0, 2, crc, at.EXCHANGE)]


def test_nothing_is_crossed_over_a_link_or_without_the_cpp() -> None:
    link = Link(LinkModel(latency_us=10, gbit=8))
    assert not channel(None, 0, (0,)).can_cross
    assert not channel(None, 0, (0,), crosses=lambda window, messages: None, link=link).can_cross
