"""Two passes whose tickets go by turns go through them together, in order, where they can."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from tests.comm.toy import DECODE, PREFILL, Recording, local_world
from tests.comm.windows_in_memory import NoWaiter, channel

from interlace.comm.collectives import preemption_point
from interlace.comm.driver import run_blocking
from interlace.comm.errors import CollectiveTimeoutError, OrderError
from interlace.comm.path import Ticket
from interlace.comm.plan import PlanState, StepPlan
from interlace.comm.post_order import PostOrder

ABREAST = replace(CONFIG, policy="abreast")


def both(state: PlanState | None = None) -> StepPlan:
    """A step of both, whose tickets are decode's and prefill's by turns."""
    return made(BOTH, state, ABREAST)


def test_a_step_of_both_is_one_call_and_its_tickets_go_by_turns() -> None:
    rank, step = Rank(), both()
    outputs = rank.walk(step, decode=straight(), prefill=straight())
    for name in (DECODE, PREFILL):
        assert outputs[name] == ["straight", [f"{name} {stage}" for stage in STAGES]]
    assert rank.crossed == [[0, 2, 4], [1, 3, 5]]
    assert rank.posted == list(step.tickets)
    assert [ticket.path for ticket in step.tickets] == [DECODE, PREFILL] * 3
    assert all(one.abreast == () for one in rank.crossings)  # nothing is held behind it
    assert all(tuple(among) == step.tickets for among in rank.among)


def test_tickets_hashes_and_the_journal_are_those_of_single_messages() -> None:
    some, none, half = Rank(), Rank(cross=()), Rank(cross=(DECODE,))
    for rank in (some, none, half):
        state = PlanState()
        for proposal in (DECODES, BOTH, PREFILLS, BOTH, BOTH, DECODES):
            step = made(proposal, state, ABREAST)
            rank.walk(step, **{name: straight() for name in step.start})
            state = step.after
    assert [len(tickets) for tickets in some.crossed] == [3] * 9
    assert len(half.crossings) == 2
    assert not none.crossings
    alike = ("step", "seq", "path", "role", "stage", "comm_seq", "members")
    noted = [
        [[getattr(t, name) for name in alike] for t in rank.sequencer.journal.tickets]
        for rank in (some, none, half)
    ]
    assert [one[1] for one in noted[0]] == list(range(len(noted[0])))
    for rank, notes in zip((none, half), noted[1:], strict=True):
        assert rank.posted == some.posted
        assert rank.sequencer.hashes == some.sequencer.hashes
        assert sorted(notes) == noted[0]


def test_what_was_computed_before_the_call_is_told_and_the_others_time_left_out() -> None:
    rank = Rank()
    rank.late = {1: 3}
    rank.walk(both(), decode=straight(), prefill=straight())
    decode, prefill, *later = rank.sequencer.journal.tickets
    for record, crossing in zip((decode, prefill), rank.crossings, strict=True):
        ((paused_at, resumed_at),) = record.pauses
        assert record.resumed_at < paused_at < resumed_at == crossing.moments()[0][0]
        assert (record.computed_at, record.posted_at) == crossing.moments()[0][1:3]
    assert decode.pauses[0][0] < prefill.resumed_at
    assert all(record.pauses == () for record in later)
    waits = [moment[4] for one in rank.crossings for moment in one.moments()]
    assert rank.sequencer.waited_s == sum(waits) > 0


def test_whose_message_is_late_is_waited_for_by_name() -> None:
    rank = Rank()
    walk = rank.sequencer.walk(both(), {DECODE: straight(), PREFILL: straight()})
    rank.late = {1: 4}
    told, request = list[str](), walk.send(None)
    while request is not None:
        told.append(str(request.where))
        while not request.communicator.poll(request.handle):
            pass
        try:
            request = walk.send(request.communicator.result(request.handle))
        except StopIteration:
            request = None
    assert told == [
        "rank 0: epoch 0 step 0 seq 2 decode/ep dispatch",
        "rank 0: epoch 0 step 0 seq 3 prefill/ep dispatch",
    ]
    assert ("posted", 2) in rank.progress.told
    assert ("posted", 3) in rank.progress.told
    assert rank.progress.told[-2:] == [("crossed", 0, 2, 4, 3), ("crossed", 1, 3, 5, 3)]


def test_a_message_that_never_comes_closes_both_passes() -> None:
    closed = []

    async def watched(name: str) -> Any:
        try:
            return await straight()
        finally:
            closed.append(name)

    rank, seconds = Rank(), itertools.count()
    rank.late = {2: 1000}
    walk = rank.sequencer.walk(both(), {name: watched(name) for name in (DECODE, PREFILL)})
    words = "no answer within 5 s: rank 0: epoch 0 step 0 seq 4 decode/ep combine"
    with pytest.raises(CollectiveTimeoutError, match=words):
        run_blocking(walk, park=never, waiter=NoWaiter(), clock=lambda: float(next(seconds)))
    walk.close()
    rank.sequencer.close()
    assert sorted(closed) == [DECODE, PREFILL]


async def stops() -> Any:
    await preemption_point()
    return await straight()


@pytest.mark.parametrize(
    ("cross", "passes", "change"),
    [
        ((DECODE,), {}, {}),
        ((PREFILL,), {}, {}),
        ((DECODE, PREFILL), {PREFILL: stops}, {}),
        ((DECODE, PREFILL), {DECODE: stops}, {}),
        ((DECODE, PREFILL), {PREFILL: lambda: straight(STAGES[:2])}, {"finish": (DECODE,)}),
        ((DECODE, PREFILL), {}, {"meet_at": 3}),
    ],
)
def test_where_one_cannot_both_go_one_by_one_in_the_same_order(
    cross: Sequence[str], passes: dict[str, Any], change: dict[str, Any]
) -> None:
    step = replace(both(), **change)
    if "finish" in change:
        step = replace(step, tickets=step.tickets[:4])
    rank = Rank(cross=cross, meeting=local_world(1).communicator("meeting", (0,), 0))
    started = {name: passes.get(name, straight)() for name in (DECODE, PREFILL)}
    if "finish" in change:
        step = replace(step, finish=())
    rank.walk(step, **started)
    assert rank.crossings == []
    assert rank.posted == list(step.tickets)
    rank.sequencer.close()


def test_passes_that_do_not_go_by_turns_to_the_end_go_one_by_one() -> None:
    step, paths = both(), (DECODE, PREFILL, PREFILL, DECODE, DECODE, PREFILL)
    ops = {DECODE: iter(PROGRAM), PREFILL: iter(PROGRAM)}
    tickets = [
        replace(ticket, path=path, op=next(ops[path]))
        for ticket, path in zip(step.tickets, paths, strict=True)
    ]
    rank = Rank()
    rank.walk(replace(step, tickets=tuple(tickets)), decode=straight(), prefill=straight())
    assert rank.crossings == []
    assert rank.posted == tickets


@pytest.mark.parametrize(
    ("nth", "changes", "words"),
    [
        (3, {"op": replace(PROGRAM[1], kind="Gather")}, "asks for Exchange ep dispatch"),
        (4, {"seq": 3}, "seq 3 decode/ep combine: comes after seq 3"),
        (1, {"op": replace(PROGRAM[0], stage="x")}, "seq 1 prefill/ep x: .* asks for Exchange ep"),
    ],
)
def test_tickets_that_are_not_the_passes_are_refused_and_nothing_is_posted(
    nth: int, changes: dict[str, Any], words: str
) -> None:
    rank, step = Rank(), both()
    tickets = list(step.tickets)
    tickets[nth] = replace(tickets[nth], **changes)
    with pytest.raises(OrderError, match=words):
        rank.walk(replace(step, tickets=tuple(tickets)), decode=straight(), prefill=straight())
    assert rank.crossings == []
    assert rank.posted == []


def test_ranks_outside_a_path_skip_its_tickets_and_the_other_goes_one_by_one() -> None:
    decode, prefill = PATHS
    rank = Rank(paths=(decode, replace(prefill, groups={"ep": ((1,),)})))
    outputs = rank.walk(both(), decode=straight())
    assert outputs == {DECODE: [["counts"], ["dispatch"], ["combine"]]}
    assert rank.crossings == []


class Late(Recording):
    """Of which a message is there once it has been asked for a few times."""

    num_asked = 0

    def poll(self, handle: Any) -> bool:
        self.num_asked += 1
        return self.num_asked > 5 and super().poll(handle)


def test_a_stretch_that_is_not_gone_through_is_not_answered_with_a_watch() -> None:
    rank = Rank(meeting=Late(local_world(1).communicator("meeting", (0,), 0), []))
    rank.walk(replace(both(), meet_at=1), decode=straight(), prefill=straight())
    assert rank.crossings == []
    waiting = [t for t in rank.sequencer.journal.tickets if t.path == PREFILL]
    assert waiting[0].pauses


# ---- the witness


def of(path: str, tickets: Sequence[Ticket]) -> list[Ticket]:
    return [ticket for ticket in tickets if ticket.path == path]


def test_the_witness_admits_both_and_what_comes_after_them() -> None:
    posts, step = PostOrder(0), both()
    among = step.tickets
    for path in (DECODE, PREFILL):
        posts.admit_all(path, "ep", of(path, among), among)
    later = both(step.after).tickets
    posts.admit_all(DECODE, "ep", of(DECODE, later), later)
    with pytest.raises(OrderError, match=r"seq 0 decode/ep counts comes after .* seq 11 "):
        posts.admit_all(DECODE, "ep", of(DECODE, among), among)


def test_the_witness_lets_each_post_its_own_once() -> None:
    posts, among = PostOrder(3), both().tickets
    own = of(DECODE, among)
    with pytest.raises(OrderError, match=r"rank 3: .* this is the communicator of prefill/ep"):
        posts.admit_all(PREFILL, "ep", own, among)
    posts.admit_all(DECODE, "ep", own, among)
    with pytest.raises(OrderError, match=r"rank 3: .* seq 0 decode/ep counts"):
        posts.admit_all(DECODE, "ep", own, among)
    stranger = replace(among[1], seq=77)
    with pytest.raises(OrderError, match=r"rank 3: .* seq 77 prefill/ep counts"):
        posts.admit_all(PREFILL, "ep", [stranger], among)


def test_a_channel_asks_the_witness_for_its_own_among_all() -> None:
    posts, among = PostOrder(0), both().tickets
    ends = channel(None, 0, (0,), posts=posts, crosses=lambda window, messages: None)
    ends.cross(of(DECODE, among), among)
    with pytest.raises(OrderError, match="this is the communicator of decode/ep"):
        ends.cross(of(PREFILL, among), among)
