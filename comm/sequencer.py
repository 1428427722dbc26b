"""Walks agreed plans over any number of paths. Sans-I/O: it only posts and asks to finish."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from .collectives import Collective, Finish, Forward, perform
from .communicator import Communicator
from .errors import OrderError
from .journal import Journal, TicketRecord
from .path import Op, Path, Ticket
from .plan import PlanState, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    communicator: Communicator
    handle: Any
    ticket: Ticket
    resumed_at: float
    posted_at: float


_NO_STATE = PlanState()
"""What follows a plan is not hashed: it is derived from the plan and the state before."""


class Sequencer:
    """Holds the forward passes in flight and at most one outstanding collective of each.

    Every ticket does the same: settle the path's outstanding collective, send its result into the
    forward pass, let it compute to its next await, check that request against the ticket, post it.
    So one path computes while the other's bytes travel. `around(path)` (stream, inference mode) is
    entered for every resume and the post that follows it: a collective posted on another stream
    would not wait for the payload. Nothing ambient is held while a forward pass is suspended.
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
    ) -> None:
        self.rank = rank
        self.paths = {path.name: path for path in paths}
        self.communicators = communicators
        self.journal = journal
        self.keys = tuple(sorted((path.name, role) for path in paths for role in path.groups))
        self.waited_s = 0.0
        self._around, self._clock = around, clock
        self._plan_hash, self._last_seq = 0, -1
        self._hash = dict.fromkeys(self.keys, 0)
        self._running: dict[str, Forward] = {}
        self._outstanding: dict[str, _Outstanding] = {}

    @property
    def hashes(self) -> tuple[int, ...]:
        """Rolling crc32 of the tickets issued per (path, role), by `keys`; last, the plans'."""
        return (*(self._hash[key] for key in self.keys), self._plan_hash)

    async def walk(self, plan: StepPlan, started: Mapping[str, Forward]) -> dict[str, Any]:
        """Issue the plan's tickets; return the output of each path that finishes.

        Raises OrderError, before posting, for a request that is not its ticket's, for a forward
        pass that ends early or late, and for a seq that does not increase.
        """
        self._plan_hash = zlib.crc32(repr(replace(plan, after=_NO_STATE)).encode(), self._plan_hash)
        try:
            for name in plan.drop:
                await self.drop(name)
            self._start(plan, started)
        except BaseException:
            for forward in started.values():
                forward.close()
            raise
        for ticket in plan.tickets:
            if self.rank in self.paths[ticket.path].members:
                await self._issue(ticket)
        results = {}
        for name in plan.finish:
            if self.rank in self.paths[name].members:
                results[name] = await self._return_of(name, plan.step)
        return results

    async def settle(self, path: str) -> Any:
        """Finish the path's outstanding collective, if any, and return its result."""
        out = self._outstanding.get(path)
        if out is None:
            return None
        asked_at = self._clock()
        ticket = out.ticket
        where = f"rank {self.rank}: {ticket}"
        value = await perform(Finish(communicator=out.communicator, handle=out.handle, where=where))
        settled_at = self._clock()
        del self._outstanding[path]
        self.waited_s += settled_at - asked_at
        self.journal.tickets.append(
            TicketRecord(
                step=ticket.step,
                seq=ticket.seq,
                path=path,
                role=ticket.op.role,
                stage=ticket.op.stage,
                comm_seq=ticket.comm_seq,
                members=self.paths[path].group_of(ticket.op.role, self.rank),
                resumed_at=out.resumed_at,
                posted_at=out.posted_at,
                settled_at=settled_at,
                waited_s=settled_at - asked_at,
            )
        )
        return value

    async def drop(self, path: str) -> None:
        """Abandon the path's forward pass: settle, then close; its result is discarded."""
        if path in self._running:
            await self.settle(path)
            self._running.pop(path).close()

    def close(self) -> None:
        """Close every forward pass without settling; for the way out after a failure."""
        for forward in self._running.values():
            forward.close()
        self._running.clear()

    def _start(self, plan: StepPlan, started: Mapping[str, Forward]) -> None:
        mine = [name for name in plan.start if self.rank in self.paths[name].members]
        if sorted(started) != sorted(mine) or any(name in self._running for name in mine):
            raise OrderError(
                f"rank {self.rank}: step {plan.step} starts {mine}, but forward passes were given "
                f"for {sorted(started)} and {sorted(self._running)} are in flight"
            )
        self._running.update(started)

    async def _issue(self, ticket: Ticket) -> None:
        if ticket.seq <= self._last_seq:
            raise self._refusal(ticket, f"comes after seq {self._last_seq}")
        if ticket.path not in self._running:
            raise self._refusal(ticket, "no forward pass of this path is in flight")
        value = await self.settle(ticket.path)
        resumed_at = self._clock()
        with self._around(ticket.path):
            try:
                request: Collective = self._running[ticket.path].send(value)
            except StopIteration:
                raise self._refusal(ticket, "the forward pass already returned") from None
            asked, op = type(request).__name__, ticket.op
            if (asked, request.role, request.stage) != (op.kind, op.role, op.stage):
                raise self._refusal(
                    ticket, f"the forward pass asks for {asked} {request.role} {request.stage}"
                )
            key = ticket.path, op.role
            communicator = self.communicators[key]
            self._hash[key] = _roll(self._hash[key], ticket)
            self._last_seq = ticket.seq
            handle = communicator.post(request, ticket)
        self._outstanding[ticket.path] = _Outstanding(
            communicator=communicator,
            handle=handle,
            ticket=ticket,
            resumed_at=resumed_at,
            posted_at=self._clock(),
        )

    def _refusal(self, ticket: Ticket, why: str) -> OrderError:
        posted = "; ".join(str(out.ticket) for out in self._outstanding.values()) or "nothing"
        return OrderError(
            f"rank {self.rank}: {ticket}: {why}; in flight: {posted}; "
            f"last tickets: {self.journal.tail()}"
        )

    async def _return_of(self, path: str, step: int) -> Any:
        value = await self.settle(path)
        with self._around(path):
            try:
                request = self._running.pop(path).send(value)
            except StopIteration as stop:
                return stop.value
        raise OrderError(
            f"rank {self.rank}: step {step} {path}: the program has ended, "
            f"but the forward pass asks for {request.role} {request.stage}"
        )


def _roll(previous: int, ticket: Ticket) -> int:
    """The ticket folded into a communicator's hash. It holds the global seq: hashes of each
    communicator alone are blind to two paths that swap places."""
    head = struct.pack("<qqqq", ticket.epoch, ticket.comm_seq, ticket.seq, ticket.version)
    return zlib.crc32(head + ticket.op.stage.encode(), previous)


def record_program(
    forward: Forward, sizes: Mapping[str, int], stub_result: Callable[[Collective, int], Any]
) -> tuple[Op, ...]:
    """The collectives of one forward pass, from running it on an empty batch with stub results."""
    ops: list[Op] = []
    value = None
    while True:
        try:
            request: Collective = forward.send(value)
        except StopIteration:
            return tuple(ops)
        ops.append(Op(kind=type(request).__name__, role=request.role, stage=request.stage))
        value = stub_result(request, sizes[request.role])


def run_straight(forward: Forward, communicators: Mapping[str, Communicator]) -> Any:
    """Drive one forward pass alone to its return, blocking in every collective, role by role."""
    value = None
    while True:
        try:
            request: Collective = forward.send(value)
        except StopIteration as stop:
            return stop.value
        communicator = communicators[request.role]
        handle = communicator.post(request, None)
        value = communicator.result(handle)
