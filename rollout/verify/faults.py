"""Things that go wrong on one rank of a run, and how the whole must then end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from interlace.comm.collectives import PreemptionPoint
from interlace.comm.errors import (
    CanaryError,
    CommunicationError,
    DeadlockError,
    DivergedError,
    OrderError,
    PeerLostError,
)
from interlace.comm.path import Ticket
from interlace.comm.plan import StepPlan
from interlace.moe.description import Description

from .memory import SimulatedWindows
from .properties import check, right
from .scenario import Scenario, scenario
from .simulation import Simulation, Wiring
from .toy_model import ToyContext, ToyWeights
from .violation import Violation


class BrokenRankError(Exception):
    """What a rank raises that fails on its own."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """Goes wrong on `rank` at the `nth` opportunity."""

    kind: str
    rank: int
    nth: int
    at_step: int = -1
    """The step it fell into; -1 until then."""
    seen: int = field(default=0)

    def is_now(self, rank: int) -> bool:
        """Whether this opportunity is the one."""
        if rank != self.rank or self.at_step >= 0:
            return False
        self.seen += 1
        return self.seen > self.nth


Expectation = tuple[type[BaseException], ...]


def provoke(seed: int, kind: str, wiring: Wiring | None = None) -> bool:
    """Run the seed's scenario with this fault in it; False if it never came to the fault.

    Raises a `Violation` unless the run ended as it must: with the error that names the fault, one
    error on every rank, nothing wrong told before, and where ranks renew themselves, in order.
    """
    plan = scenario(seed)
    draw = random.Random(seed ^ 0xFA17)
    fault = Fault(kind=kind, rank=draw.randrange(plan.world), nth=draw.choice((0, 1, 3, 8)))
    return _KINDS[kind](plan, fault, wiring or Wiring())


def _raises(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank fails by itself; all others are told, and a new epoch goes on with new windows."""
    run = _crash(plan, fault, wiring, None)
    if run is None:
        return False
    again = Simulation(plan, wiring, epoch=1)
    again.run()
    check(again)
    return True


def _dead_epoch(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A new epoch finds in its windows what the old one left there, and takes none of it."""
    plan = replace(plan, window=True)
    fault.nth = min(fault.nth, 1)
    windows = SimulatedWindows(plan.slots)
    if _crash(plan, fault, wiring, windows) is None:
        return False
    again = Simulation(plan, wiring, windows=windows, epoch=1)
    try:
        again.run()
    except DivergedError:
        _told_right(again)
        return True
    check(again)
    return True


def _crash(
    plan: Scenario, fault: Fault, wiring: Wiring, windows: SimulatedWindows | None
) -> Simulation | None:
    def fail(rank: int, ticket: Ticket) -> None:
        if fault.is_now(rank):
            fault.at_step = ticket.step
            raise BrokenRankError(f"rank {rank} fails at {ticket}")

    run = Simulation(plan, wiring, on_ticket=fail, windows=windows)
    return run if _ends(run, fault, (BrokenRankError,)) else None


def _stops(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank is stopped from outside; the others say so instead of waiting for ever."""

    def stop(rank: int, ticket: Ticket) -> None:
        if fault.is_now(rank) and run.world.running is not None:
            fault.at_step = ticket.step
            run.world.running.halted.add(rank)

    run = Simulation(plan, wiring, on_ticket=stop)
    return _ends(run, fault, (DeadlockError,))


def _swapped(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank issues two tickets of its plan the other way round; named within a step."""

    class Swapping(wiring.sequencer):  # type: ignore[name-defined,misc]
        agreed: StepPlan

        async def walk(self, plan: StepPlan, started: Mapping[str, Any]) -> dict[str, Any]:
            self.agreed = plan
            places = [
                nth
                for nth, (one, two) in enumerate(zip(plan.tickets, plan.tickets[1:], strict=False))
                if one.path != two.path
            ]
            if places and fault.is_now(self.rank):
                fault.at_step = plan.step
                plan = replace(plan, tickets=_exchange(plan.tickets, places[0]))
            out: dict[str, Any] = await super().walk(plan, started)
            return out

        def _note_plan(self, plan: StepPlan) -> None:
            super()._note_plan(self.agreed)

    fault.nth, plan = 0, scenario(plan.seed, both_paths=True)
    run = Simulation(plan, replace(wiring, sequencer=Swapping))
    return _ends(run, fault, (DivergedError, DeadlockError), within_a_step=True)


def _exchange(tickets: tuple[Ticket, ...], nth: int) -> tuple[Ticket, ...]:
    """Two neighbours change places and numbers, so that the local check sees nothing odd."""
    one, two = tickets[nth : nth + 2]
    swapped = replace(two, seq=one.seq), replace(one, seq=two.seq)
    return *tickets[:nth], *swapped, *tickets[nth + 2 :]


def _another_plan(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank walks a plan that differs in nothing but a number."""

    class Misled(wiring.sequencer):  # type: ignore[name-defined,misc]
        def _note_plan(self, plan: StepPlan) -> None:
            if fault.is_now(self.rank):
                fault.at_step = plan.step
                plan = replace(plan, decoding=plan.decoding + 1)
            super()._note_plan(plan)

    run = Simulation(plan, replace(wiring, sequencer=Misled))
    return _ends(run, fault, (DivergedError,), within_a_step=True)


def _old_ticket(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank is handed a ticket whose number it has already passed; it refuses before posting."""

    class Repeating(wiring.sequencer):  # type: ignore[name-defined,misc]
        async def _issue(self, ticket: Ticket) -> None:
            if ticket.seq and fault.is_now(self.rank):
                fault.at_step = ticket.step
                ticket = replace(ticket, seq=ticket.seq - 1)
            await super()._issue(ticket)

    run = Simulation(plan, replace(wiring, sequencer=Repeating))
    return _ends(run, fault, (OrderError,))


def _another_op(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """A rank's forward pass asks for another collective than its ticket's; nothing is posted."""

    class Straying(wiring.model):  # type: ignore[name-defined,misc]
        def forward(
            self,
            weights: ToyWeights,
            context: ToyContext,
            description: Description,
            *,
            max_rows: int = 0,
        ) -> Any:
            inner = super().forward(weights, context, description, max_rows=max_rows)
            return _Astray(inner, fault) if context.rank == fault.rank else inner

    run = Simulation(plan, replace(wiring, model=Straying))
    return _ends(run, fault, (OrderError,))


class _Astray:
    """A forward pass one of whose requests is another's."""

    def __init__(self, forward: Any, fault: Fault) -> None:
        self._forward, self._fault = forward, fault
        self.close, self.throw = forward.close, forward.throw

    def send(self, value: Any) -> Any:
        request = self._forward.send(value)
        if not isinstance(request, PreemptionPoint) and self._fault.is_now(self._fault.rank):
            self._fault.at_step = 0
            return replace(request, stage="elsewhere")
        return request


def _foreign_bytes(plan: Scenario, fault: Fault, wiring: Wiring) -> bool:
    """Somebody else writes into a message; whoever reads it says which bytes are not its own."""
    plan = replace(plan, window=True)
    draw = random.Random(plan.seed ^ 0xB17E)
    where = draw.choice(("canary", "magic", "epoch", "comm_seq", "stage"))

    def scribble(rank: int, ticket: Ticket) -> None:
        if fault.is_now(rank):
            fault.at_step = ticket.step
            path = next(path for path in run.config.paths if path.name == ticket.path)
            members = path.group_of(ticket.op.role, rank)
            run.windows.scribble((path.name, ticket.op.role), members, rank, ticket.slot, where)

    run = Simulation(plan, wiring, on_posted=scribble)
    error = CanaryError if where in ("canary", "magic") else DivergedError
    return _ends(run, fault, (error,))


_KINDS: dict[str, Callable[[Scenario, Fault, Wiring], bool]] = {
    "a rank raises, a new epoch": _raises,
    "a rank stops": _stops,
    "two tickets swapped": _swapped,
    "another plan": _another_plan,
    "an old ticket": _old_ticket,
    "another collective": _another_op,
    "foreign bytes in a message": _foreign_bytes,
    "messages of a dead epoch": _dead_epoch,
}
KINDS = tuple(_KINDS)


def _ends(
    run: Simulation, fault: Fault, wanted: Expectation, *, within_a_step: bool = False
) -> bool:
    """Run to the end the fault must have; False if it never came to the fault."""

    def lost(culprit: int, error: BaseException) -> BaseException:
        return PeerLostError(f"rank {culprit} failed: {type(error).__name__}: {error}")

    try:
        run.run(poison=lost)
    except wanted:
        if fault.at_step < 0:
            raise
    except Exception as error:
        words = " or ".join(kind.__name__ for kind in wanted)
        raise Violation(f"{fault.kind}: {words} was due, not {error!r}") from error
    else:
        if fault.at_step < 0:
            check(run)
            return False
        raise Violation(f"{fault.kind} in step {fault.at_step}: nobody noticed")
    _one_error_each(run, wanted)
    _told_right(run)
    if within_a_step and max(run.book.proposed) > fault.at_step + 2:
        raise Violation(
            f"{fault.kind} in step {fault.at_step}: seen in step {max(run.book.proposed) - 1}"
        )
    return True


def _one_error_each(run: Simulation, wanted: Expectation) -> None:
    """Every rank that had not returned ended with a typed error, and left nothing running."""
    running = run.world.running
    ends = running.ends if running is not None else {}
    returned = running.returned if running is not None else ()
    for rank in range(run.scenario.world):
        end = ends.get(rank)
        if end is None and rank not in returned:
            raise Violation(f"rank {rank} was never told")
        if end is not None and not isinstance(end, (*wanted, CommunicationError)):
            raise Violation(f"rank {rank} ended with {end!r}")


def _told_right(run: Simulation) -> None:
    """What left before the fault was noticed was right."""
    requests = {(request.trajectory, request.turn): request for request in run.requests}
    for result in run.book.results:
        right(run.scenario.layers, requests[result.trajectory, result.turn], result)
