from dataclasses import astuple

import pytest

from interlace.comm.journal import Begun, Crossed, Journal, TicketRecord
from interlace.comm.path import Op, Ticket


def record(seq: int) -> TicketRecord:
    return TicketRecord(
        step=0,
        seq=seq,
        path="decode",
        role="ep",
        stage=f"{seq}.counts",
        comm_seq=seq,
        members=(0, 1),
        resumed_at=0.0,
        computed_at=0.0,
        posted_at=0.0,
        settled_at=0.0,
        waited_s=0.0,
    )


def test_a_journal_with_a_bound_keeps_the_last_tickets() -> None:
    journal = Journal(limit=3)
    for seq in range(10):
        journal.tickets.append(record(seq))
    assert [ticket.seq for ticket in journal.tickets] == [7, 8, 9]


def test_a_journal_without_one_keeps_everything() -> None:
    journal = Journal()
    for seq in range(1000):
        journal.tickets.append(record(seq))
    assert len(journal.tickets) == 1000


def test_the_tail_names_the_last_tickets_oldest_first() -> None:
    journal = Journal()
    assert journal.tail() == "no ticket yet"
    for seq in range(10):
        journal.tickets.append(record(seq))
    assert journal.tail(2) == "8 decode/ep 8.counts; 9 decode/ep 9.counts"


def crossed(first: int, num: int) -> Crossed:
    """By turns of two paths."""
    tickets = [
        Ticket(
            epoch=0,
            step=4,
            seq=seq,
            path=("decode", "prefill")[seq % 2],
            path_seq=seq // 2,
            comm_seq=seq // 2,
            slot=0,
            op=Op(kind="Exchange", role="ep", stage=f"{seq}.counts"),
            version=0,
            rows=1,
        )
        for seq in range(first, first + num)
    ]
    return Crossed(
        tickets,
        [(seq + 0.1, seq + 0.2, seq + 0.3, seq + 0.4, 0.05) for seq in range(first, first + num)],
        members={"decode": (0, 1), "prefill": (1, 2)},
        begun={"decode": Begun(0.5), "prefill": Begun(0.25, ((0.3, 0.4),))},
    )


def test_tickets_that_were_crossed_are_read_one_by_one() -> None:
    journal = Journal()
    journal.tickets.append(record(9))
    journal.tickets.extend(crossed(10, 3))
    journal.tickets.append(record(13))
    assert len(journal.tickets) == 5
    assert [ticket.seq for ticket in journal.tickets] == [9, 10, 11, 12, 13]
    assert [ticket.seq for ticket in journal.tickets[1:]] == [10, 11, 12, 13]
    one, other, third = list(journal.tickets)[1:4]
    assert astuple(one) == (
        *(4, 10, "decode", "ep", "10.counts", 5, (0, 1)),
        *(0.5, 10.2, 10.3, 10.4, 0.05, ()),
    )
    assert (other.members, other.resumed_at, other.pauses) == ((1, 2), 0.25, ((0.3, 0.4),))
    assert (third.resumed_at, third.pauses) == (12.1, ())
    assert journal.tail(2) == "12 decode/ep 12.counts; 13 decode/ep 13.counts"
    journal.tickets.clear()
    assert not journal.tickets
    assert list(journal.tickets) == []


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_bound_cuts_what_was_crossed_in_the_middle(limit: int) -> None:
    journal = Journal(limit)
    for first in (0, 3, 6):
        journal.tickets.extend(crossed(first, 3))
    journal.tickets.append(record(9))
    expected = list(range(10))[-limit:]
    assert [ticket.seq for ticket in journal.tickets] == expected
    assert len(journal.tickets) == len(expected)
    assert journal.tickets[-1].seq == 9
