from interlace.comm.journal import Journal, TicketRecord


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
