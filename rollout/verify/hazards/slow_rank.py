"""Row 47 of the catalogue: who is only slow."""

from __future__ import annotations

from dataclasses import replace

from interlace.comm.collectives import finish
from interlace.comm.diagnosis import diagnose
from interlace.comm.driver import run_blocking
from interlace.comm.rank_status import Activity, ProcessState, RankStatus, TicketMark
from interlace.comm.verdict import Verdict

from .hazard import Hazard, Outcome, StarvationError, outcome_of

TIMEOUT_S, WARM_UP_S = 100.0, 150.0


class SlowPeer:
    """A rank that compiles its kernels for `WARM_UP_S` before it comes to its first dispatch; the
    wait for it moves the clock."""

    timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self.now = 0.0

    def begin(self) -> None: ...

    def arm(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self.now += 1.0

    def poll(self, handle: None) -> bool:
        return self.now >= WARM_UP_S

    def result(self, handle: None) -> str:
        return "dispatched"


def one_deadline_for_all() -> Outcome:
    """A dispatch waits for 100 s, whoever may be warming up, and its error names nobody."""

    def run() -> str:
        peer = SlowPeer()
        wait = finish(peer, None, "rank 0: the first dispatch")
        said: str = run_blocking(
            wait, park=lambda seconds: None, waiter=peer, clock=lambda: peer.now
        )
        return said

    return outcome_of(run)


def slow_is_not_dead() -> Outcome:
    """The same two ranks before the diagnosis: rank 1 is SLOW, by name, as it was seen on ever
    new lines of its code."""

    def run() -> str:
        ticket = TicketMark(
            epoch=0,
            step=0,
            seq=0,
            comm_seq=0,
            path="decode",
            role="ep",
            stage="0.dispatch",
            computing_at=1.0,
            posted_at=1.0,
            settled_at=0.0,
        )
        waits = RankStatus(
            rank=0,
            activity=Activity.WAITING,
            since=1.0,
            where=f"rank 0: {ticket}",
            alive_at=TIMEOUT_S,
            process=ProcessState.RUNNING,
            tickets=(ticket,),
        )
        warms_up = replace(
            waits,
            rank=1,
            activity=Activity.HOST,
            where="",
            places=40,
            tickets=(replace(ticket, posted_at=0.0),),
        )
        found = diagnose([waits, warms_up], by=0, now=TIMEOUT_S + 1, deadline_s=TIMEOUT_S)
        verdicts = {rank.rank: rank.verdict for rank in found.causes}
        if verdicts != {1: Verdict.SLOW}:
            raise StarvationError(f"verdicts {verdicts}")
        return found.text

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=47,
        url="https://github.com/sgl-project/sglang/issues/15598",
        title="a rank that warms up is taken for dead",
        how="unit",
        expected="timeout",
        unsafe=one_deadline_for_all,
        ours=slow_is_not_dead,
    ),
)
