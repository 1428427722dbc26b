"""Walks agreed plans over any number of paths. Sans-I/O: it only posts and asks to finish."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

from .collectives import (
    Arrival,
    Collective,
    Early,
    Exchange,
    Finish,
    Forward,
    Gather,
    PreemptionPoint,
    Stretch,
    Watch,
    perform,
)
from .communicator import Communicator
from .crossing import Crossing
from .errors import DivergedError, OrderError
from .journal import Begun, Crossed, Journal, TicketRecord
from .path import Op, Path, Ticket
from .plan import StepPlan, fingerprint
from .post_order import PostOrder
from .progress import NoProgress, Progress


@dataclass(slots=True, kw_only=True)
class _Computation:
    """A forward pass on its way from one await to the next: to a request, or to its return."""

    resumed_at: float
    stopped_at: float = 0.0
    """At a preemption point, or done."""
    pauses: tuple[tuple[float, float], ...] = ()
    done: bool = False
    request: Collective | None = None
    point: PreemptionPoint | None = None
    """Where it has stopped, if it is not done."""
    output: Any = None

    @property
    def over(self) -> bool:
        """The forward pass has returned."""
        return self.done and self.request is None


@dataclass(slots=True, kw_only=True)
class _Where:
    """Whose ticket is waited for; put into words only where somebody asks."""

    rank: int
    ticket: Ticket

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.ticket}"


@dataclass(slots=True, kw_only=True)
class _Outstanding(_Where):
    communicator: Communicator
    handle: Any
    computation: _Computation
    """What led to it."""
    posted_at: float
    waited_s: float = 0.0

    @property
    def finishing(self) -> tuple[Communicator, Any]:
        return self.communicator, self.handle


Crosses = Callable[[Sequence[Ticket], Sequence[Ticket]], Crossing]
"""Begins a crossing for the first tickets. The others are these and what other paths cross
meanwhile, in order: the rank's next posts."""
Watches = Callable[[Any], object | None]
"""Makes what is in a `Watch`, for a communicator's handle."""


class Sequencer:
    """Holds the forward passes in flight and at most one outstanding collective of each.

    Every ticket does the same: settle the path's outstanding collective, send its result into the
    forward pass, let it compute to its next await, check that request against the ticket, post it.
    So one path computes while the other's bytes travel. While one path has to wait, a result of
    another that has arrived is taken and computed on, up to the next await, and no further than its
    next preemption point once the wait is over: only posts are bound to the order. `around(path)`
    (stream, inference mode) is entered for every resume and every post: a collective posted on
    another stream would not wait for the payload. Nothing ambient is held while a forward pass is
    suspended.
    """

    def __init__(
        self,
        *,
        rank: int,
        paths: Sequence[Path],
        communicators: Mapping[tuple[str, str], Communicator],
        around: Callable[[str], AbstractContextManager[None]],
        clock: Callable[[], float],
        journal: Journal,
        progress: Progress | None = None,
        prechecks: Mapping[tuple[str, str], Communicator] | None = None,
        posts: PostOrder | None = None,
        meeting: Communicator | None = None,
        crossings: Mapping[tuple[str, str], Crosses] | None = None,
        watches: Mapping[tuple[str, str], Watches] | None = None,
    ) -> None:
        """`prechecks`: communicators of bytes, one per (path, role), on which all members of a
        group compare each ticket before they post it. Dear, and it can hide what it looks for.
        `posts`: the witness of `communicators`, told which request each path makes.
        `meeting`: bytes of all ranks, for plans in which they meet; nothing else goes over it.
        `crossings`: those of `communicators` over which a pass goes through many collectives in
        one call, where no other path is in between, or two passes whose tickets go by turns. Not
        with `prechecks`, which come before each ticket. `watches`: those of `communicators` whose
        messages can be watched for."""
        self.rank = rank
        self.paths = {path.name: path for path in paths}
        self._mine = {path.name for path in paths if rank in path.members}
        self.communicators = communicators
        self.journal = journal
        self.keys = tuple(sorted((path.name, role) for path in paths for role in path.groups))
        self.waited_s = 0.0
        self.around, self._clock = around, clock
        self._progress = progress or NoProgress()
        self._prechecks, self._posts, self._meeting = prechecks, posts, meeting
        self._crossings = {} if prechecks else crossings or {}
        self._watches = watches or {}
        self._plan_hash, self._last_seq = 0, -1
        self._hash = dict.fromkeys(self.keys, 0)
        self._members: dict[tuple[str, str], tuple[int, ...]] = {}
        self._running: dict[str, Forward] = {}
        self._outstanding: dict[str, _Outstanding] = {}
        self._ahead: dict[str, _Computation] = {}

    @property
    def hashes(self) -> tuple[int, ...]:
        """Rolling crc32 of the tickets issued per (path, role), by `keys`; last, the plans'."""
        return (*(self._hash[key] for key in self.keys), self._plan_hash)

    async def walk(self, plan: StepPlan, started: Mapping[str, Forward]) -> dict[str, Any]:
        """Issue the plan's tickets; return the output of each path that finishes.

        Raises OrderError, before posting, for a request that is not its ticket's, for a forward
        pass that ends early or late, and for a seq that does not increase.
        """
        self._note_plan(plan)
        try:
            for name in plan.drop:
                await self.drop(name)
            self._start(plan, started)
        except BaseException:
            for forward in started.values():
                forward.close()
            raise
        index = 0
        while index < len(plan.tickets):
            ticket = plan.tickets[index]
            if index and index == plan.meet_at:
                await self._meet(plan.step)
            num_crossed = 0
            if ticket.path in self._mine:
                if self._crossings:
                    num_crossed = await self._cross(plan, index)
                if not num_crossed:
                    await self._issue(ticket)
            index += num_crossed or 1
        results = {}
        for name in plan.finish:
            if name in self._mine:
                results[name] = await self._return_of(name, plan.step)
        return results

    async def finish(self, communicator: Communicator, handle: Any, where: str) -> Any:
        """The result of any collective; paths whose own has arrived compute on meanwhile."""
        value, waited_s = await self._await(communicator, handle, where, key=None)
        self.waited_s += waited_s
        return value

    async def settle(self, path: str) -> Any:
        """Finish the path's outstanding collective, if any, and return its result."""
        out = self._outstanding.get(path)
        if out is None:
            return None
        if self._ahead or len(self._outstanding) > 1:
            key = path, out.ticket.op.role
            value, out.waited_s = await self._await(out.communicator, out.handle, out, key=key)
        else:  # nobody can make use of the wait
            asked_at = self._clock()
            value = await perform(
                Finish(communicator=out.communicator, handle=out.handle, where=out)
            )
            out.waited_s = self._clock() - asked_at
        self._settled(path)
        return value

    async def drop(self, path: str) -> None:
        """Abandon the path's forward pass: settle, then close; its result is discarded."""
        if path in self._running:
            await self.settle(path)
            self._ahead.pop(path, None)
            self._running.pop(path).close()

    def close(self) -> None:
        """Close every forward pass without settling; for the way out after a failure."""
        for forward in self._running.values():
            forward.close()
        self._running.clear()
        self._ahead.clear()

    # ---- waiting

    async def _await(
        self,
        communicator: Communicator,
        handle: Any,
        where: object,
        *,
        key: tuple[str, str] | None,
    ) -> tuple[Any, float]:
        """The result, and the seconds waited; those in which other paths computed are left out.

        `key`: whose it is, if it is a path's."""
        asked_at, computed_s = self._clock(), 0.0
        while True:
            names = [name for name in self._outstanding if key is None or name != key[0]]
            preempted = [name for name, one in self._ahead.items() if not one.done]
            answer = await perform(
                Finish(
                    communicator=communicator,
                    handle=handle,
                    where=where,
                    others=tuple([self._outstanding[name].finishing for name in names]),
                    busy=bool(preempted),
                )
            )
            if not isinstance(answer, Early):
                return answer, self._clock() - asked_at - computed_s
            began_at, value = self._clock(), answer.value
            if answer.index < len(names):
                self._settled(name := names[answer.index])
            else:
                name = preempted[0]
                if not isinstance(self._ahead[name].point, Stretch):
                    watches = None if key is None else self._watches.get(key)
                    value = Watch(None if watches is None else watches(handle))
            with self.around(name):
                self._ahead[name] = self._go_on(name, value, self._ahead.get(name))
            computed_s += self._clock() - began_at

    def _settled(self, path: str) -> None:
        out = self._outstanding.pop(path)
        computation = out.computation
        self._progress.settled(out.ticket)
        self._record(
            out.ticket,
            computation.resumed_at,
            computation.stopped_at,
            out.posted_at,
            self._clock(),
            out.waited_s,
            computation.pauses,
        )

    def _record(
        self,
        ticket: Ticket,
        resumed_at: float,
        computed_at: float,
        posted_at: float,
        settled_at: float,
        waited_s: float,
        pauses: tuple[tuple[float, float], ...],
    ) -> None:
        path, role = ticket.path, ticket.op.role
        self.waited_s += waited_s
        self.journal.tickets.append(
            TicketRecord(
                step=ticket.step,
                seq=ticket.seq,
                path=path,
                role=role,
                stage=ticket.op.stage,
                comm_seq=ticket.comm_seq,
                members=self._members_of(path, role),
                resumed_at=resumed_at,
                computed_at=computed_at,
                posted_at=posted_at,
                settled_at=settled_at,
                waited_s=waited_s,
                pauses=pauses,
            )
        )

    def _members_of(self, path: str, role: str) -> tuple[int, ...]:
        members = self._members.get((path, role))
        if members is None:
            members = self._members[path, role] = self.paths[path].group_of(role, self.rank)
        return members

    # ---- computing and posting

    def _start(self, plan: StepPlan, started: Mapping[str, Forward]) -> None:
        mine = [name for name in plan.start if name in self._mine]
        if sorted(started) != sorted(mine) or any(name in self._running for name in mine):
            raise OrderError(
                f"rank {self.rank}: step {plan.step} starts {mine}, but forward passes were given "
                f"for {sorted(started)} and {sorted(self._running)} are in flight"
            )
        self._running.update(started)

    async def _issue(self, ticket: Ticket) -> None:
        self._admit(ticket)
        key = ticket.path, ticket.op.role
        if self._prechecks is not None:
            await self._compare(self._prechecks[key], ticket)
        value = await self.settle(ticket.path)
        self._progress.computing(ticket)
        with self.around(ticket.path):
            computation = self._computed(ticket.path, value)
            request = self._match(ticket, computation.request)
            communicator = self.communicators[key]
            self._note(ticket)
            handle = communicator.post(request, ticket)
        self._progress.posted(ticket)
        self._outstanding[ticket.path] = _Outstanding(
            rank=self.rank,
            communicator=communicator,
            handle=handle,
            ticket=ticket,
            computation=computation,
            posted_at=self._clock(),
        )

    async def _cross(self, plan: StepPlan, index: int) -> int:
        """Let a pass that begins here, or two by turns, go through its tickets in one call, if it
        can and nothing is in flight that could use the time; how many were issued."""
        passes: dict[str, _Computation] = {}
        for name, ticket in zip(self._beginning(plan, index), plan.tickets[index:], strict=False):
            self._admit(ticket)
            self._progress.computing(ticket)
            with self.around(name):
                passes[name] = self._go_on(name, None, None)
        tickets = self._stretch(plan, index, passes)
        if tickets:
            await self._go_through(passes, tickets)
        self._ahead.update(passes)
        return len(tickets)

    def _beginning(self, plan: StepPlan, index: int) -> tuple[str, ...]:
        """Paths whose passes may go straight from here on: one, or two where all tickets that are
        left go by turns."""
        if self._outstanding or not all(one.over for one in self._ahead.values()):
            return ()
        tickets = plan.tickets[index:]
        able = [ticket.path for ticket in tickets[:2] if self._may_cross(ticket, plan)]
        if not able or able[0] != tickets[0].path:
            return ()
        one, *others = able
        if others in ([], [one]):
            return (one,)
        by_turns = all(ticket.path == able[nth % 2] for nth, ticket in enumerate(tickets))
        return tuple(able) if by_turns else (one,)

    def _may_cross(self, ticket: Ticket, plan: StepPlan) -> bool:
        path, role = ticket.path, ticket.op.role
        return path in self._mine and path in plan.start and (path, role) in self._crossings

    def _stretch(
        self, plan: StepPlan, index: int, passes: Mapping[str, _Computation]
    ) -> tuple[Ticket, ...]:
        """The tickets of stretches that begin here; none if others are in between."""
        names = tuple(passes)
        points = [one.point for one in passes.values()]
        stretches = [point for point in points if isinstance(point, Stretch)]
        if not names or len(stretches) < len(names):
            return ()
        num = len(stretches[0].stages)
        end = index + num * len(names)
        tickets = plan.tickets[index:end]
        alike = all(len(stretch.stages) == num for stretch in stretches)
        if not alike or len(tickets) < end - index or index < plan.meet_at < end:
            return ()
        seq, kind = self._last_seq, Exchange.__name__
        stages = zip(*(stretch.stages for stretch in stretches), strict=True)
        turns = cycle(zip(names, stretches, strict=True))
        for ticket, (name, stretch), stage in zip(
            tickets, turns, chain.from_iterable(stages), strict=False
        ):
            op = ticket.op
            if ticket.path != name:
                return ()
            if ticket.seq <= seq:
                raise self._refusal(ticket, f"comes after seq {seq}")
            seq = ticket.seq
            if op.stage != stage or op.role != stretch.role or op.kind != kind:
                asked = f"{kind} {stretch.role} {stage}"
                raise self._refusal(ticket, f"the forward pass asks for {asked}")
        return tickets

    async def _go_through(
        self, passes: Mapping[str, _Computation], tickets: Sequence[Ticket]
    ) -> None:
        own = {name: tickets[nth :: len(passes)] for nth, name in enumerate(passes)}
        for mine in own.values():
            self._note(*mine)
        ready_at = [one.stopped_at for one in passes.values()]
        crossings = {
            name: self._crossings[name, mine[0].op.role](mine, tickets)
            for name, mine in own.items()
        }
        abreast = tuple(crossings.values()) if len(crossings) > 1 else ()
        for name, crossing in crossings.items():
            crossing.abreast = abreast
            with self.around(name):
                self._resume(name, passes[name], crossing)
        while waiting := [n for n, one in passes.items() if isinstance(one.point, Arrival)]:
            missing = [name for name in waiting if not crossings[name].poll(None)]
            if missing:
                name = min(missing, key=lambda name: crossings[name].at)
                await self._arrival(crossings[name], own[name][crossings[name].at])
            for name in waiting:
                with self.around(name):
                    self._resume(name, passes[name], None)
        self._crossed(passes, tickets, own, crossings, ready_at)
        for crossing in abreast:
            crossing.abreast = ()  # they hold one another

    async def _arrival(self, crossing: Crossing, ticket: Ticket) -> None:
        self._progress.computing(ticket)
        self._progress.posted(ticket)
        where = _Where(rank=self.rank, ticket=ticket)
        await perform(Finish(communicator=crossing, handle=None, where=where))

    def _crossed(
        self,
        passes: Mapping[str, _Computation],
        tickets: Sequence[Ticket],
        own: Mapping[str, Sequence[Ticket]],
        crossings: Mapping[str, Crossing],
        ready_at: Sequence[float],
    ) -> None:
        """Put down what passes have crossed, in the order of their tickets."""
        moments = {name: crossing.moments() for name, crossing in crossings.items()}
        members: dict[str, tuple[int, ...]] = {}
        begun: dict[str, Begun] = {}
        for nth, (name, mine) in enumerate(own.items()):
            at = moments[name]
            if len(at) < len(mine):
                raise self._refusal(mine[len(at)], "the forward pass left its stretch")
            self._progress.crossed(mine, at)
            self.waited_s += sum([moment[4] for moment in at])
            computation = passes[name]
            stood_aside = ((ready_at[nth], at[0][0]),) if len(own) > 1 else ()
            begun[name] = Begun(computation.resumed_at, stood_aside)
            members[name] = self._members_of(name, mine[0].op.role)
            computation.resumed_at = at[-1][3]
        by_turns = tuple(chain.from_iterable(zip(*moments.values(), strict=True)))
        self.journal.tickets.extend(Crossed(tickets, by_turns, members=members, begun=begun))

    async def _meet(self, step: int) -> None:
        assert self._meeting is not None, f"step {step} has a meeting, but there is no place for it"
        request = Gather(role="control", stage="meeting", payload=b"here")
        handle = self._meeting.post(request, None)
        await self.finish(self._meeting, handle, f"rank {self.rank}: step {step}: all ranks meet")

    def _admit(self, ticket: Ticket) -> None:
        if ticket.seq <= self._last_seq:
            raise self._refusal(ticket, f"comes after seq {self._last_seq}")
        if ticket.path not in self._running:
            raise self._refusal(ticket, "no forward pass of this path is in flight")

    def _match(self, ticket: Ticket, request: Collective | None) -> Collective:
        if request is None:
            raise self._refusal(ticket, "the forward pass already returned")
        op, kind = ticket.op, type(request).__name__
        if kind == op.kind and request.role == op.role and request.stage == op.stage:
            return request
        asked = f"{kind} {request.role} {request.stage}"
        raise self._refusal(ticket, f"the forward pass asks for {asked}")

    def _note(self, *tickets: Ticket) -> None:
        """They are issued, on one communicator."""
        last = tickets[-1]
        key = last.path, last.op.role
        self._hash[key] = _roll(self._hash[key], tickets)
        self._last_seq = last.seq

    def _note_plan(self, plan: StepPlan) -> None:
        self._plan_hash = zlib.crc32(fingerprint(plan), self._plan_hash)

    def _computed(self, path: str, value: Any) -> _Computation:
        """Let the forward pass compute to its next request, or to its return, with `value` for what
        it waits for; None where it was resumed before."""
        computation = self._ahead.pop(path, None)
        if computation is None or not computation.done:
            computation = self._go_on(path, value, computation)
        while not computation.done:
            self._resume(path, computation, None)
        return computation

    def _go_on(self, path: str, value: Any, begun: _Computation | None) -> _Computation:
        """Let it compute as far, or to its next preemption point. `begun`: not done yet."""
        now = self._clock()
        if begun is None:
            computation = _Computation(resumed_at=now)
        else:
            computation = begun
            computation.pauses += ((computation.stopped_at, now),)
        self._resume(path, computation, value)
        return computation

    def _resume(self, path: str, computation: _Computation, value: Any) -> None:
        try:
            request = self._running[path].send(value)
        except StopIteration as stop:
            computation.output, computation.done, computation.point = stop.value, True, None
        else:
            if isinstance(request, PreemptionPoint):
                computation.point = request
            else:
                computation.request, computation.done, computation.point = request, True, None
                if self._posts is not None:
                    self._posts.asked(path, request)
        computation.stopped_at = self._clock()

    async def _return_of(self, path: str, step: int) -> Any:
        value = await self.settle(path)
        with self.around(path):
            computation = self._computed(path, value)
        del self._running[path]
        if computation.request is not None:
            raise OrderError(
                f"rank {self.rank}: step {step} {path}: the program has ended, but the forward "
                f"pass asks for {computation.request.role} {computation.request.stage}"
            )
        return computation.output

    async def _compare(self, precheck: Communicator, ticket: Ticket) -> None:
        """Raises DivergedError, naming ranks and tickets, unless all members hold this ticket."""
        payload = f"{ticket} {ticket.comm_seq}".encode().ljust(_PRECHECK_BYTES, b"\0")
        request = Gather(role=ticket.op.role, stage="precheck", payload=payload[:_PRECHECK_BYTES])
        handle = precheck.post(request, None)
        where = f"rank {self.rank}: before {ticket}"
        answers = await self.finish(precheck, handle, where)
        members = self.paths[ticket.path].group_of(ticket.op.role, self.rank)
        told = {
            rank: bytes(answer).rstrip(b"\0").decode()
            for rank, answer in zip(members, answers, strict=True)
        }
        if len(set(told.values())) > 1:
            listed = "; ".join(
                f"rank {rank} is about to post {what}" for rank, what in told.items()
            )
            raise DivergedError(f"{where}: {listed}")

    def _refusal(self, ticket: Ticket, why: str) -> OrderError:
        posted = "; ".join(str(out.ticket) for out in self._outstanding.values()) or "nothing"
        return OrderError(
            f"rank {self.rank}: {ticket}: {why}; in flight: {posted}; "
            f"last tickets: {self.journal.tail()}"
        )


_PRECHECK_BYTES = 128


def _roll(previous: int, tickets: Sequence[Ticket]) -> int:
    """The tickets folded into a communicator's hash, as one by one. It holds the global seq: hashes
    of each communicator alone are blind to two paths that swap places."""
    fields = [n for t in tickets for n in (t.epoch, t.comm_seq, t.seq, t.version, t.op.crc)]
    return zlib.crc32(array("q", fields).tobytes(), previous)


def record_program(
    forward: Forward, sizes: Mapping[str, int], stub_result: Callable[[Collective, int], Any]
) -> tuple[Op, ...]:
    """The collectives of one forward pass, from running it on an empty batch with stub results."""
    ops: list[Op] = []
    value = None
    while True:
        try:
            request: Collective | PreemptionPoint = forward.send(value)
        except StopIteration:
            return tuple(ops)
        value = None
        if isinstance(request, PreemptionPoint):
            continue
        ops.append(Op(kind=type(request).__name__, role=request.role, stage=request.stage))
        value = stub_result(request, sizes[request.role])


def run_straight(forward: Forward, communicators: Mapping[str, Communicator]) -> Any:
    """Drive one forward pass alone to its return, blocking in every collective, role by role."""
    value = None
    while True:
        try:
            request: Collective | PreemptionPoint = forward.send(value)
        except StopIteration as stop:
            return stop.value
        value = None
        if isinstance(request, PreemptionPoint):
            continue
        communicator = communicators[request.role]
        handle = communicator.post(request, None)
        value = communicator.result(handle)
