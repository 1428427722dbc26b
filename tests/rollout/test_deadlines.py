"""How long a rank may wait: as long as loading until every path has run once."""

from __future__ import annotations

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


def settle(deadlines: Deadlines, path: str, times: int) -> None:
    for seq in range(times):
        ticket = Ticket(
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
