"""One fault between the sequencer and the transport of one rank: two posts get mixed up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from interlace.comm.collectives import Collective, Forward
from interlace.comm.communicator import Communicator
from interlace.comm.path import Ticket
from interlace.comm.plan import StepPlan
from interlace.comm.sequencer import Sequencer

Kind = Literal["order", "payloads", "tickets", "communicators", "in the sequencer"]
"""Of two neighbours in the order: order, the second is posted first; payloads, each is posted with
the other's request; tickets, with the other's ticket; communicators, on the other's; in the
sequencer, which issues the second first and numbers both as it issues them."""
Relation = Literal["same group", "across groups"]
"""Whether both posts are over the same ranks, or one over tp and one over ep."""
MIXED_UP: tuple[Kind, ...] = ("payloads", "tickets", "communicators")
_PATHS = "decode", "prefill"
_LATE = 6
_RELATIONS: tuple[Relation, ...] = "same group", "across groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What is to be mixed up, where: the same on every rank that draws it."""

    number: int
    kind: Kind
    rank: int
    first: str
    """The path of the post that comes first in the order."""
    relation: Relation
    equal: bool
    """Both payloads are of one shape and dtype."""
    one_strategy: bool
    """Both paths have the same program, so that neighbours may even be of one stage."""
    after: int
    """Places to let pass that would have done. From step `_LATE` on none is, and all do."""

    @classmethod
    def draw(cls, seed: int, number: int, world: int, kinds: tuple[Kind, ...]) -> Injection:
        """A function of its arguments alone."""
        draw = random.Random(f"{seed} {number}")
        relation = draw.choice(_RELATIONS)
        return cls(
            number=number,
            kind=draw.choice(kinds),
            rank=draw.randrange(world),
            first=draw.choice(_PATHS),
            relation=relation,
            equal=draw.random() < 0.5,
            one_strategy=draw.random() < 0.5,
            after=draw.randrange(3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """Where it was done."""

    step: int
    first: str
    """The ticket that comes first in the order, in words."""
    second: str
    paths: tuple[str, str]
    roles: tuple[str, str]
    equal: bool


@dataclass(slots=True, kw_only=True)
class _Held:
    """A post, held back or made."""

    inner: Communicator
    request: Collective
    ticket: Ticket
    made: tuple[Communicator, Any] | None = None
    """Where it was posted, and the handle there."""


class Injector:
    """Waits for the place, holds its first post back, and mixes it up with the next."""

    def __init__(self, injection: Injection | None) -> None:
        """None: every post goes through as it is."""
        self.injected: Injected | None = None
        self._injection = injection
        self._left = 0 if injection is None else injection.after
        self._next: dict[int, Ticket] = {}
        self._held: _Held | None = None
        self._instead: Ticket | None = None
        self._in_sequencer = injection is not None and injection.kind == "in the sequencer"

    def foretell(self, tickets: list[Ticket]) -> None:
        """What this rank is going to post in the step that begins."""
        self._next = {one.seq: other for one, other in itertools.pairwise(tickets)}

    def instead_of(self, ticket: Ticket) -> Ticket:
        """What the sequencer issues where the order says `ticket`."""
        if self._instead is not None:
            other, self._instead = self._instead, None
            return replace(other, seq=ticket.seq)
        if not (self._in_sequencer and self._is_place(ticket)):
            return ticket
        self._left -= 1
        if self._left >= 0 and ticket.step < _LATE:
            return ticket
        self._instead, other = ticket, self._next[ticket.seq]
        self.injected = _injected(ticket, other)
        return replace(other, seq=ticket.seq)

    def post(self, inner: Communicator, request: Collective, ticket: Ticket) -> _Held:
        post = _Held(inner=inner, request=request, ticket=ticket)
        if self._held is None:
            if not self._in_sequencer and self._is_place(ticket):
                self._held = post
            else:
                _make(post, post)
            return post
        first, self._held = self._held, None
        if not self._is_wanted(first, post):
            _make(first, first)
            _make(post, post)
        else:
            self._mix_up(first, post)
        return post

    def _is_place(self, ticket: Ticket) -> bool:
        wanted, other = self._injection, self._next.get(ticket.seq)
        if wanted is None or self.injected is not None or other is None:
            return False
        if other.path == ticket.path or ticket.step >= _LATE:
            return other.path != ticket.path
        same = ticket.op.role == other.op.role
        return ticket.path == wanted.first and same == (wanted.relation == "same group")

    def _is_wanted(self, first: _Held, second: _Held) -> bool:
        assert self._injection is not None
        if first.ticket.step >= _LATE:
            return True
        if self._injection.equal and not _are_equal(first, second):
            return False
        self._left -= 1
        return self._left < 0

    def _mix_up(self, first: _Held, second: _Held) -> None:
        assert self._injection is not None
        self.injected = _injected(first.ticket, second.ticket, equal=_are_equal(first, second))
        match self._injection.kind:
            case "order":
                _make(second, second)
                _make(first, first)
            case "payloads":
                _make(first, first, request=second.request)
                _make(second, second, request=first.request)
            case "tickets":
                _make(second, second, ticket=first.ticket)
                _make(first, first, ticket=second.ticket)
            case "communicators":
                _make(first, second)
                _make(second, first)


def _injected(first: Ticket, second: Ticket, *, equal: bool = False) -> Injected:
    return Injected(
        step=first.step,
        first=str(first),
        second=str(second),
        paths=(first.path, second.path),
        roles=(first.op.role, second.op.role),
        equal=equal,
    )


def _make(
    post: _Held, where: _Held, *, request: Collective | None = None, ticket: Ticket | None = None
) -> None:
    handle = where.inner.post(request or post.request, ticket or post.ticket)
    post.made = where.inner, handle


def _are_equal(first: _Held, second: _Held) -> bool:
    one, other = first.request.payload, second.request.payload
    return bool(one.shape == other.shape and one.dtype == other.dtype)


class MixedUp:
    """The communicator that a sequencer is given: every post passes the injector."""

    def __init__(self, inner: Communicator, injector: Injector) -> None:
        self.timeout_s = inner.timeout_s
        self._inner, self._injector = inner, injector

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        assert ticket is not None
        return self._injector.post(self._inner, request, ticket)

    def poll(self, handle: _Held) -> bool:
        if handle.made is None:
            return False
        where, posted = handle.made
        return where.poll(posted)

    def result(self, handle: _Held) -> Any:
        assert handle.made is not None
        where, posted = handle.made
        return where.result(posted)

    def abort(self) -> None:
        self._inner.abort()


class Foretelling(Sequencer):
    """Tells its injector what comes, and asks it what to issue."""

    injector: Injector

    async def walk(self, plan: StepPlan, started: Mapping[str, Forward]) -> dict[str, Any]:
        mine = [t for t in plan.tickets if self.rank in self.paths[t.path].members]
        self.injector.foretell(mine)
        return await super().walk(plan, started)

    async def _issue(self, ticket: Ticket) -> None:
        await super()._issue(self.injector.instead_of(ticket))
