"""The rules broken on purpose, one arm each, so that breaking them is seen to fail.

Every arm wraps or subclasses a shipped class; nothing shipped has a switch for it. What each came
to on each transport is in docs/safety/unsafe.md. No torch.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Literal

from .collectives import Collective, Forward
from .communicator import Communicator
from .path import Op, Ticket
from .plan import StepPlan
from .sequencer import Sequencer

Arm = Literal[
    "one_window",
    "one_group",
    "free_order",
    "swap",
    "idle_skips",
    "one_slot",
    "slot_per_path",
    "communicator_hashes",
    "early_return",
    "early_commit",
]
Level = Literal["L0", "L1", "L2"]
"""L0: the executor's own check. L1: hashes in the exchange. L2: headers of messages."""

Key = tuple[str, str]
Own = Mapping[Key, Communicator]

GROUP_SLOTS = 64
"""Enough that messages of an emulated process group, which buffers, are never overwritten."""


def reslotted(arms: Collection[Arm], own: Own, *, slots: int) -> Own:
    """The communicators given, or with slots as arms one_slot and slot_per_path choose them."""
    if "one_slot" in arms:
        own = {key: Reslotted(inner, lambda ticket: 0) for key, inner in own.items()}
    if "slot_per_path" in arms:
        own = {
            key: Reslotted(inner, lambda ticket: ticket.path_seq % slots)
            for key, inner in own.items()
        }
    return own


def unsafe_sequencer(
    arms: Collection[Arm], without: Collection[Level] = (), *, seed: int, slots: int
) -> type[Sequencer]:
    """The class that walks plans: Sequencer itself, or one with the arms in front of it."""
    front: list[type[Sequencer]] = []
    if "free_order" in arms:
        front.append(FreeOrder)
    if "swap" in arms:
        front.append(Swaps)
    if "communicator_hashes" in arms:
        front.append(CommunicatorHashes)
    if "L1" in without:
        front.append(WithoutHashes)
    if "idle_skips" in arms:
        front.append(IdleSkips)
    if "L0" in without:
        front.append(WithoutCheck)
    if not front:
        return Sequencer
    named = {"unsafe_seed": seed, "unsafe_slots": slots}
    return type("UnsafeSequencer", (*front, Sequencer), named)


# ---- below the sequencer


class Reslotted:
    """Every ticket goes to the slot that `slot_of` says, and not to its own.

    Arms one_slot and slot_per_path: a rank that is ahead writes its next message over one that
    others have not read yet.
    """

    def __init__(self, inner: Communicator, slot_of: Callable[[Ticket], int]) -> None:
        self.timeout_s = inner.timeout_s
        self._inner, self._slot_of = inner, slot_of

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        moved = None if ticket is None else replace(ticket, slot=self._slot_of(ticket))
        return self._inner.post(request, moved)

    def poll(self, handle: Any) -> bool:
        return self._inner.poll(handle)

    def result(self, handle: Any) -> Any:
        return self._inner.result(handle)

    def abort(self) -> None:
        self._inner.abort()


class InOrderOfPosts(Reslotted):
    """One for both paths: messages are matched by how many were posted before, as a process group
    does it. In a LocalWorld this is arm one_group."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner, lambda ticket: ticket.comm_seq % GROUP_SLOTS)
        self._posted = 0

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        numbered = None if ticket is None else replace(ticket, comm_seq=self._posted)
        self._posted += 1
        return super().post(request, numbered)


def one_window(own: Own) -> dict[Key, Communicator]:
    """Arm one_window: all paths use the first one's state, each with its own counts and slots.

    Messages of one path lie where the other's are awaited.
    """
    first = _first_of_role(own)
    return {key: own[first[key[1]]] for key in own}


def one_group_in_order_of_posts(own: Own) -> dict[Key, Communicator]:
    """Arm one_group in a LocalWorld: what a process group that both paths use would do."""
    shared = {role: InOrderOfPosts(own[key]) for role, key in _first_of_role(own).items()}
    return {key: shared[key[1]] for key in own}


def _first_of_role(own: Own) -> dict[str, Key]:
    first: dict[str, Key] = {}
    for key in own:
        first.setdefault(key[1], key)
    return first


# ---- in the sequencer


class FreeOrder(Sequencer):
    """Arm free_order: whichever path is ready goes first, on each rank by itself.

    Among several, or while none is ready, a draw of `unsafe_seed`, rank and step decides. Tickets
    of a path that follow one another in the plan stay together, each path's own order stays, and
    posts are numbered as they are made, so this rank sees nothing odd.
    """

    unsafe_seed = 0

    async def walk(self, plan: StepPlan, started: Mapping[str, Forward]) -> dict[str, Any]:
        self._draw = random.Random(f"{self.unsafe_seed} {self.rank} {plan.step}")
        self._runs: dict[str, deque[list[Ticket]]] = {}
        self._run: deque[Ticket] = deque()
        mine = [t for t in plan.tickets if self.rank in self.paths[t.path].members]
        for path, run in groupby(mine, key=lambda ticket: ticket.path):
            self._runs.setdefault(path, deque()).append(list(run))
        return await super().walk(plan, started)

    async def _issue(self, ticket: Ticket) -> None:
        if not self._run:
            names = [name for name, runs in self._runs.items() if runs]
            ready = [name for name in names if self._is_ready(name)]
            self._run.extend(self._runs[self._draw.choice(ready or names)].popleft())
        await super()._issue(replace(self._run.popleft(), seq=ticket.seq))

    def _is_ready(self, path: str) -> bool:
        out = self._outstanding.get(path)
        return out is None or out.communicator.poll(out.handle)


class Swaps(Sequencer):
    """Arm swap: on the last rank two neighbours of different paths change places, once a step.

    The least that can be wrong with the order: nobody waits for it but a device that is strict.
    """

    unsafe_seed = 0

    async def walk(self, plan: StepPlan, started: Mapping[str, Forward]) -> dict[str, Any]:
        pairs = [(a, b) for a, b in pairwise(plan.tickets) if a.path != b.path]
        self._instead: dict[int, Ticket] = {}
        if pairs and all(self.rank == path.members[-1] for path in self.paths.values()):
            first, second = random.Random(f"{self.unsafe_seed} {plan.step}").choice(pairs)
            self._instead[first.seq] = replace(second, seq=first.seq)
            self._instead[second.seq] = replace(first, seq=second.seq)
        return await super().walk(plan, started)

    async def _issue(self, ticket: Ticket) -> None:
        await super()._issue(self._instead.get(ticket.seq, ticket))


class CommunicatorHashes(Sequencer):
    """Arm communicator_hashes: each communicator's tickets are hashed, their place among those of
    the others is not. Two paths that change places leave no trace."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._without_seq = dict.fromkeys(self.keys, 0)

    @property
    def hashes(self) -> tuple[int, ...]:
        return (*(self._without_seq[key] for key in self.keys), super().hashes[-1])

    def _note(self, *tickets: Ticket) -> None:
        super()._note(*tickets)
        for ticket in tickets:
            key = ticket.path, ticket.op.role
            told = struct.pack("<qqq", ticket.epoch, ticket.comm_seq, ticket.version)
            told += ticket.op.stage.encode()
            self._without_seq[key] = zlib.crc32(told, self._without_seq[key])


class WithoutHashes(Sequencer):
    """Level L1 off: the exchange compares zeros."""

    @property
    def hashes(self) -> tuple[int, ...]:
        return (0,) * len(super().hashes)


class _AsksFirst(Sequencer):
    """Lets a path compute to its next request before a ticket is looked at."""

    async def _request_of(self, path: str) -> Collective | None:
        value = await self.settle(path)
        with self.around(path):
            self._ahead[path] = computation = self._computed(path, value)
        return computation.request


class IdleSkips(_AsksFirst):
    """Arm idle_skips: tickets of a forward pass that has already returned are left out.

    Together with a forward pass that returns at once where there are no rows.
    """

    async def _issue(self, ticket: Ticket) -> None:
        if await self._request_of(ticket.path) is not None:
            await super()._issue(ticket)


class WithoutCheck(_AsksFirst):
    """Level L0 off: what the forward pass asks for is posted, whatever the ticket says."""

    unsafe_slots = 2

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._num_posted = dict.fromkeys(self.keys, 0)

    async def _issue(self, ticket: Ticket) -> None:
        request = await self._request_of(ticket.path)
        if request is None:
            return
        op = Op(kind=type(request).__name__, role=request.role, stage=request.stage)
        nth = self._num_posted[ticket.path, op.role]
        self._num_posted[ticket.path, op.role] += 1
        slot = nth % self.unsafe_slots
        await super()._issue(replace(ticket, op=op, comm_seq=nth, slot=slot))
