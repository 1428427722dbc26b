"""Forward passes of ranks in one process over windows, each in one call or message by message."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.comm.windows_in_memory import NoWaiter, crossing, end, pages
from tests.moe.driving import Ranks

from interlace.comm.collectives import Arrival, Forward, PreemptionPoint, Stretch
from interlace.comm.crossing import Crossing
from interlace.comm.path import Op, Ticket
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import WindowChannel
from interlace.comm.workspace import Workspace
from interlace.moe.description import Description
from interlace.moe.kv_cache import KVCache, attention_planes
from interlace.moe.model import ForwardOutput

PATH, ROLE, SLOTS, CAPACITY = "decode", "ep", 2, 1 << 18


def tickets_of(stages: Sequence[str], first: int = 0) -> list[Ticket]:
    """Of one pass; `first`: messages of passes before it."""
    return [
        Ticket(
            epoch=0,
            step=3,
            seq=first + nth,
            path=PATH,
            path_seq=first + nth,
            comm_seq=first + nth,
            slot=(first + nth) % SLOTS,
            op=Op(kind="Exchange", role=ROLE, stage=stage),
            version=0,
            rows=0,
        )
        for nth, stage in enumerate(stages)
    ]


class Walker:
    """One rank's forward pass, as far as it has got."""

    def __init__(
        self,
        forward: Forward,
        communicator: WindowCommunicator,
        tickets: Iterable[Ticket],
        *,
        crosses: bool,
    ) -> None:
        self.output: ForwardOutput | None = None
        self.crossing: Crossing | None = None
        self.waits_for: tuple[Any, Any] | None = None
        """Communicator, or crossing, and handle."""
        self._forward, self._communicator, self._crosses = forward, communicator, crosses
        self._tickets = deque(tickets)

    def go_on(self, value: Any = None) -> None:
        """To its next wait, or to its return."""
        while True:
            try:
                request = self._forward.send(value)
            except StopIteration as stop:
                self.output, self.waits_for = stop.value, None
                assert not self._tickets
                return
            value = None
            if isinstance(request, Stretch) and self._crosses:
                tickets = [self._tickets.popleft() for _ in request.stages]
                value = self.crossing = self._communicator.cross(tickets, tickets)
            elif isinstance(request, Arrival):
                self.waits_for = self.crossing, None
                return
            elif not isinstance(request, PreemptionPoint):
                handle = self._communicator.post(request, self._tickets.popleft())
                self.waits_for = self._communicator, handle
                return

    def arrived(self) -> bool:
        """Whether there was something to go on with."""
        assert self.waits_for is not None
        communicator, handle = self.waits_for
        if not communicator.poll(handle):
            return False
        self.go_on(communicator.result(handle))
        return True


class Ways:
    """Ranks with caches and windows of their own; those that `cross` go straight."""

    def __init__(self, ranks: Ranks, cross: Sequence[bool], capacity: int = CAPACITY) -> None:
        world = len(ranks.weights)
        self.ranks, self.cross = ranks, cross
        self.memories = pages(world, SLOTS, capacity)
        self.num_messages = 0
        self.crossed: tuple[bool, ...] = ()
        """Who has gone straight in the last pass."""
        self.stages = [
            f"{layer}.{part}"
            for layer in range(ranks.config.num_layers)
            for part in ("counts", "dispatch", "combine")
        ]
        self.contexts = [
            replace(
                context,
                straight=True,
                kv=KVCache(
                    num_layers=ranks.config.num_layers,
                    num_blocks=16,
                    planes=attention_planes(ranks.config, 1),
                    dtype=ranks.weights[0].embed_VD.dtype,
                    device="cpu",
                ),
            )
            for context in ranks.contexts
        ]
        names = {"path": zlib.crc32(PATH.encode()), "role": zlib.crc32(ROLE.encode())}
        self.communicators = [
            WindowCommunicator(
                WindowChannel(
                    end("c++", self.memories, rank, capacity=capacity, **names),
                    path=PATH,
                    role=ROLE,
                    members=range(world),
                    rank=rank,
                    slots=SLOTS,
                    capacity=capacity,
                    timeout_s=5.0,
                    waiter=NoWaiter(),
                    clock=lambda: 0,
                    enlarge="launch.window_mib",
                    crosses=crossing,
                ),
                role=ROLE,
                workspace=Workspace(PATH, lambda size: torch.empty(size, dtype=torch.uint8)),
            )
            for rank in range(world)
        ]

    def walkers(
        self, *descriptions: Description, changed_from: int = 0, **changes: Any
    ) -> list[Walker]:
        """A pass of each rank, not begun. `changes`: of the last rank's tickets, from one on."""
        tickets = tickets_of(self.stages, self.num_messages)
        self.num_messages += len(tickets)
        each = [tickets] * len(self.contexts)
        if changes:
            others = [replace(ticket, **changes) for ticket in tickets[changed_from:]]
            each[-1] = tickets[:changed_from] + others
        return [
            Walker(
                self.ranks.model.forward(weights, context, description),
                communicator,
                own,
                crosses=crosses,
            )
            for weights, context, description, communicator, own, crosses in zip(
                self.ranks.weights,
                self.contexts,
                descriptions,
                self.communicators,
                each,
                self.cross,
                strict=True,
            )
        ]

    def run(self, *descriptions: Description) -> list[ForwardOutput]:
        """Everybody's outputs of one pass; one description a rank."""
        walkers = self.walkers(*descriptions)
        walk(walkers)
        self.crossed = tuple(walker.crossing is not None for walker in walkers)
        return [walker.output for walker in walkers if walker.output is not None]

    @property
    def keys_and_values(self) -> list[torch.Tensor]:
        pools = [context.kv.pages for context in self.contexts]
        return [pages.pool for pages in pools if pages is not None]

    @property
    def on_the_wire(self) -> list[bytes]:
        """All memory of the windows."""
        return [memory[:] for memory in self.memories]


def walk(walkers: Sequence[Walker]) -> None:
    """All of them to their returns, whoever has something to go on with."""
    with torch.inference_mode():
        for walker in walkers:
            walker.go_on()
        while left := [walker for walker in walkers if walker.waits_for is not None]:
            assert any(walker.arrived() for walker in left), "everybody waits"
