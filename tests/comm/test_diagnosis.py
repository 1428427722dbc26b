"""From invented statuses to verdicts, case by case, and for any statuses at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.diagnosis import diagnose
from interlace.comm.path import Op, Ticket
from interlace.comm.rank_status import Activity, ProcessState, RankStatus, TicketMark
from interlace.comm.verdict import Diagnosis, Verdict, decode

NOW, DEADLINE = 1000.0, 5.0


def mark(
    seq: int,
    path: str = "decode",
    stage: str = "7.dispatch",
    *,
    ago: float = DEADLINE,
    reached: str = "settled",
) -> TicketMark:
    at = NOW - ago
    return TicketMark(
        epoch=0,
        step=12,
        seq=seq,
        comm_seq=seq,
        path=path,
        role="ep",
        stage=stage,
        computing_at=at,
        posted_at=at if reached != "computing" else 0.0,
        settled_at=at if reached == "settled" else 0.0,
    )


BEFORE = mark(1840, "prefill", "3.combine", ago=5.2)
AWAITED = mark(1841, ago=5.1, reached="posted")


def waiting(rank: int, ticket: TicketMark = AWAITED, seconds: float = 5.0) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=100 + rank,
        activity=Activity.WAITING,
        since=NOW - seconds,
        where=f"rank {rank}: {ticket}",
        alive_at=NOW,
        process=ProcessState.RUNNING,
        tickets=(BEFORE, ticket),
    )


def computing(rank: int, seconds: float = 5.1, places: int = 1) -> RankStatus:
    return replace(
        waiting(rank),
        activity=Activity.HOST,
        since=NOW - seconds,
        where="",
        place="spin (test.py:12)",
        places=places,
        tickets=(BEFORE, mark(1841, ago=seconds, reached="computing")),
    )


def verdicts(*statuses: RankStatus, deadline_s: float = DEADLINE) -> list[str]:
    return [rank.verdict.value for rank in told(*statuses, deadline_s=deadline_s).ranks]


def told(*statuses: RankStatus, deadline_s: float = DEADLINE, note: str = "") -> Diagnosis:
    return diagnose(statuses, by=0, now=NOW, deadline_s=deadline_s, note=note)


def test_the_words_of_a_mark_are_those_of_its_ticket() -> None:
    ticket = Ticket(
        epoch=3,
        step=12,
        seq=1841,
        path="decode",
        path_seq=9,
        comm_seq=4,
        slot=0,
        op=Op(kind="Exchange", role="ep", stage="7.dispatch"),
        version=0,
        rows=4,
    )
    assert str(replace(AWAITED, epoch=3)) == str(ticket)


def test_a_stopped_process_is_blocked_and_everything_is_said_in_one_line() -> None:
    stopped = replace(computing(1), process=ProcessState.STOPPED, alive_at=NOW - 4.9, place="")
    found = told(waiting(0), stopped, waiting(2))
    assert [rank.verdict for rank in found.ranks] == ["WAITING", "BLOCKED", "WAITING"]
    assert found.text == (
        "epoch 0 step 12 seq 1841 decode/ep 7.dispatch: rank 1 is BLOCKED: never posted it; "
        "in host code for 5.1 s, computing towards decode/ep 7.dispatch (seq 1841) "
        "(process stopped, state T); ranks 0, 2 waited 5.0 s. Last tickets: "
        "rank 1: prefill/ep 3.combine (seq 1840) settled, decode/ep 7.dispatch (seq 1841) "
        "computing; rank 0: prefill/ep 3.combine (seq 1840) settled, decode/ep 7.dispatch "
        "(seq 1841) posted"
    )


GONE = replace(computing(1), process=ProcessState.GONE, alive_at=NOW - 4.9)
SILENT = replace(computing(1), alive_at=NOW - 4.9)


@pytest.mark.parametrize(
    ("other", "verdict", "words"),
    [
        (GONE, "DEAD", "its process 101 has ended without a last word"),
        (SILENT, "BLOCKED", "no sign of life for 4.9 s (a C call holds the interpreter"),
        (
            replace(SILENT, process=ProcessState.UNKNOWN),
            "BLOCKED",
            "it is on another host, where it is stopped, dead, or cut off",
        ),
        (computing(1), "BLOCKED", "never posted it; in host code for 5.1 s, at spin (test.py:12)"),
        (computing(1, places=40), "SLOW", "seen on 40 different lines since"),
        (computing(1, seconds=1.0), "SLOW", "it moved on while others waited"),
        (
            waiting(1, mark(1850, ago=5.0, reached="posted")),
            "WAITING",
            "waiting for 5.0 s",
        ),
        (
            replace(waiting(1, BEFORE), tickets=(BEFORE,)),
            "WAITING",  # it waits for what comes first, and rank 0 has that behind it
            "prefill/ep 3.combine",
        ),
        (
            replace(waiting(1), where="rank 1: exchange of epoch 0 step 13", tickets=(BEFORE,)),
            "MISSING",
            "never posted it; waiting for 5.0 s for exchange of epoch 0 step 13 instead",
        ),
        (RankStatus(rank=1), "MISSING", "nothing has been heard of it"),
        (
            replace(waiting(1), activity=Activity.LEFT, process=ProcessState.GONE),
            "MISSING",
            "it left its loop in order 5.0 s ago",
        ),
        (
            replace(computing(1), activity=Activity.FAILED, where="ValueError: a shape"),
            "RAISED",
            "ValueError: a shape",
        ),
        (
            replace(computing(1), activity=Activity.FAILED, where="OrderError: asks for another"),
            "DIVERGED",
            "OrderError: asks for another",
        ),
    ],
)
def test_each_kind_of_failure_has_its_verdict(other: RankStatus, verdict: str, words: str) -> None:
    found = told(waiting(0), other)
    assert (found.ranks[1].verdict, words in found.ranks[1].what) == (verdict, True), found
    assert found.ranks[0].verdict == "WAITING"


def test_a_minority_with_another_ticket_of_the_same_number_has_diverged() -> None:
    other = replace(waiting(1, mark(1841, "prefill", "4.dispatch", reached="posted")))
    assert verdicts(waiting(0), other, waiting(2)) == ["WAITING", "DIVERGED", "WAITING"]
    assert verdicts(waiting(0), other) == ["DIVERGED", "DIVERGED"]


def test_a_rank_that_has_left_the_order_is_missing_where_the_order_stands() -> None:
    """Each has posted what the other has not; both have been on both paths before."""
    both = (BEFORE, mark(1839))
    first = replace(waiting(0), tickets=(*both, AWAITED))
    later = mark(1842, "prefill", "4.dispatch", reached="posted")
    swapped = replace(waiting(1, later), tickets=(*both, later))
    found = told(first, swapped)
    assert [rank.verdict for rank in found.ranks] == ["WAITING", "MISSING"]
    assert "seq 1842 prefill/ep 4.dispatch instead" in found.ranks[1].what


def test_whoever_computes_is_not_to_blame_before_a_deadline() -> None:
    assert verdicts(waiting(0), computing(1), GONE, deadline_s=0.0) == [
        "WAITING",
        "RUNNING",
        "DEAD",
    ]


def test_a_rank_that_is_not_on_the_path_is_not_missing() -> None:
    """It has posted what comes later in the order, and nothing of this path."""
    elsewhere = replace(
        waiting(1, mark(1850, "transfer", reached="posted")),
        tickets=(mark(1850, "transfer", reached="posted"),),
    )
    assert verdicts(waiting(0), elsewhere, computing(2)) == ["WAITING", "WAITING", "BLOCKED"]


def test_waits_that_are_no_tickets_are_compared_in_words() -> None:
    where = "every rank has loaded its weights"
    loading = replace(computing(1, seconds=30.0), tickets=())
    done = [replace(waiting(r), where=f"rank {r}: {where}", tickets=()) for r in (0, 2)]
    found = told(done[0], loading, done[1])
    assert [rank.verdict for rank in found.ranks] == ["WAITING", "BLOCKED", "WAITING"]
    assert found.text.startswith(
        "every rank has loaded its weights: rank 1 is BLOCKED: has not come to it; in host code "
        "for 30.0 s, at spin (test.py:12), before its first ticket; ranks 0, 2 waited 5.0 s."
    )


def test_a_rank_on_another_host_is_dead_if_its_connection_broke_and_it_is_silent() -> None:
    """One that is only silent may be stopped."""
    silent = replace(SILENT, process=ProcessState.UNKNOWN)
    lost = told(waiting(0), silent, deadline_s=0.0, note="PeerLostError: reset by peer")
    assert lost.ranks[1].verdict is Verdict.DEAD
    alive = replace(silent, alive_at=NOW - 0.2)
    unclear = told(waiting(0), alive, deadline_s=0.0, note="PeerLostError: reset by peer")
    assert not unclear.causes
    assert "no rank is seen to be at fault; PeerLostError: reset by peer" in unclear.text


def test_if_all_have_posted_the_transport_is_named_and_what_it_said() -> None:
    found = told(waiting(0), waiting(1), note="PeerLostError: connection reset")
    assert not found.causes
    assert "every rank that takes part has done its share" in found.text
    assert "PeerLostError: connection reset" in found.text


marks = st.builds(
    TicketMark,
    epoch=st.integers(0, 1),
    step=st.integers(0, 3),
    seq=st.integers(0, 8),
    comm_seq=st.integers(0, 8),
    path=st.sampled_from(["decode", "prefill"]),
    role=st.just("ep"),
    stage=st.sampled_from(["0.dispatch", "0.combine"]),
    computing_at=st.just(1.0),
    posted_at=st.sampled_from([0.0, 2.0]),
    settled_at=st.sampled_from([0.0, 3.0]),
)
statuses = st.builds(
    RankStatus,
    rank=st.just(0),
    pid=st.integers(0, 5),
    activity=st.sampled_from(Activity),
    since=st.floats(0, NOW),
    where=st.sampled_from(
        ["", "exchange of step 3", "OrderError: x", "PeerLostError: y", "ValueError: z"]
    )
    | marks.map(str),
    alive_at=st.floats(0, NOW),
    place=st.text(max_size=5),
    places=st.integers(0, 9),
    process=st.sampled_from(ProcessState),
    tickets=st.lists(marks, max_size=4).map(tuple),
)


@settings(deadline=None)
@given(st.lists(statuses, min_size=1, max_size=5), st.sampled_from([0.0, 5.0]))
def test_every_rank_gets_a_verdict_whatever_its_status(
    seen: list[RankStatus], deadline_s: float
) -> None:
    ranked = [replace(status, rank=rank) for rank, status in enumerate(seen)]
    found = diagnose(ranked, by=0, now=NOW, deadline_s=deadline_s, note="why")
    assert [rank.rank for rank in found.ranks] == list(range(len(seen)))
    assert all(f"rank {rank.rank} is {rank.verdict}" in found.text for rank in found.causes)
    assert "\n" not in found.text
    assert decode(found.encode()) == found
    for status, rank in zip(ranked, found.ranks, strict=True):
        if status.activity is Activity.HOST and not deadline_s:
            assert rank.verdict is not Verdict.SLOW
