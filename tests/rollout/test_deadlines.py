"""How long a rank may wait: as long as loading until every path has run once."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.comm.crossing import Moments
from interlace.comm.path import Op, Path, Ticket
from interlace.comm.progress import NoProgress
from interlace.rollout.config import Launch
from interlace.rollout.launch.deadlines import Deadlines

OP = Op(kind="Gather", role="ep", stage="0.rows")
PATHS = [
    Path(name=name, groups={"ep": ((0,),)}, program=(OP, OP), whole=True, work=(name,))
    for name in ("decode", "prefill")
]
LAUNCH = Launch(load_timeout_s=300.0, exchange_timeout_s=7.0, ticket_timeout_s=5.0)


def tickets(path: str, num: int) -> list[Ticket]:
    return [
        Ticket(
            epoch=0,
            step=0,
            seq=seq,
            path=path,
            path_seq=seq,
            comm_seq=seq,
            slot=0,
            op=OP,
            version=0,
            rows=0,
        )
        for seq in range(num)
    ]


def settle(deadlines: Deadlines, path: str, times: int) -> None:
    for ticket in tickets(path, times):
        deadlines.settled(ticket)


def test_the_first_forward_pass_of_every_path_has_the_time_of_loading() -> None:
    deadlines = Deadlines(NoProgress(), LAUNCH)
    assert 290.0 < deadlines.loading_s() <= 300.0
    deadlines.expect(PATHS)
    assert deadlines.patience() == 300.0
    settle(deadlines, "prefill", 6)
    settle(deadlines, "decode", 1)
    assert deadlines.patience() == 300.0
    settle(deadlines, "decode", 1)
    assert deadlines.patience() == 0.0
    assert deadlines.longest_wait(0.0) == 7.0


class Crossed(NoProgress):
    def __init__(self) -> None:
        self.told: list[tuple[Sequence[Ticket], Sequence[Moments]]] = []

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Moments]) -> None:
        self.told.append((tickets, moments))


def test_a_first_forward_pass_may_go_through_its_tickets_in_one_call() -> None:
    progress = Crossed()
    deadlines, moments = Deadlines(progress, LAUNCH), [(1.0, 2.0, 3.0, 4.0, 1.0)] * 2
    deadlines.expect(PATHS)
    for path in ("prefill", "prefill", "decode"):
        assert deadlines.patience() == 300.0
        deadlines.crossed(tickets(path, 2), moments)
    assert deadlines.patience() == 0.0
    deadlines.crossed(tickets("decode", 2), moments)
    assert [told[0].path for told, _ in progress.told] == ["prefill"] * 2 + ["decode"] * 2
    assert all(told == (tickets(told[0][0].path, 2), moments) for told in progress.told)
