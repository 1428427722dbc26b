"""What every communicator over a window does, whatever its payloads are. Knows no tensor library.

The payload is copied into this member's send slot when it is posted and out of the senders' slots
when the result is taken; nothing else touches it, and nobody waits in between.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from . import window_layout as at
from .collectives import Collective, Gather
from .crossing import Crosses, Crossing, packed
from .errors import (
    CanaryError,
    CapacityError,
    CollectiveTimeoutError,
    CommunicationError,
    DivergedError,
)
from .link import Link
from .path import Ticket
from .post_order import PostOrder
from .waiter import Waiter


class WindowEnd(Protocol):
    """One member's end: the C++, or its twin in `window_reference`, where it is explained."""

    def post(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        payload: Any,
        counts: Sequence[int],
        visible_at: int = 0,
        /,
    ) -> None: ...

    def postpone(self, slot: int, comm_seq: int, visible_at: int, /) -> None: ...

    def poll(self, slot: int, comm_seq: int, /) -> int: ...

    def take(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        counts: Sequence[int],
        out: Any,
        /,
    ) -> tuple[int, int, bytes] | None: ...

    def watch(self, slot: int, comm_seq: int, /) -> object | None: ...

    def close(self) -> None: ...


class WindowWaiter(Waiter, Protocol):
    """Also wakes when a message becomes visible."""

    def due(self, at_ns: int) -> None:
        """Something that `poll` has found arrives at this time; `wait` is over by then."""
        ...


class Posted(NamedTuple):
    """A message in flight: what all members' headers must say."""

    slot: int
    comm_seq: int
    epoch: int
    seq: int
    stage: int
    kind: int


class WindowChannel:
    """One group of one (path, role): counts, headers, deadlines and errors in words."""

    def __init__(
        self,
        window: WindowEnd,
        *,
        path: str,
        role: str,
        members: Sequence[int],
        rank: int,
        slots: int,
        capacity: int,
        timeout_s: float,
        waiter: WindowWaiter,
        clock: Callable[[], int],
        link: Link | None = None,
        enlarge: str = "the capacity of the window",
        epoch: int = 0,
        posts: PostOrder | None = None,
        crosses: Crosses | None = None,
    ) -> None:
        """`clock`: the window's, in nanoseconds. `enlarge`: what to raise for larger messages.
        `epoch`: that of requests that come without a ticket. `posts`: the rank's witness.
        `crosses` makes crossings over the window."""
        self.members, self.me = tuple(members), tuple(members).index(rank)
        self.timeout_s = timeout_s
        self.waiter = waiter
        self._window, self._path, self._role, self._rank = window, path, role, rank
        self._slots, self._capacity, self._enlarge = slots, capacity, enlarge
        self._clock, self._link, self._epoch = clock, link, epoch
        self._posts, self._crosses = posts, crosses
        self._num_posted = 0
        self._stages: dict[int, str] = {}
        """By crc32, those of messages so far."""

    def slot_of(self, ticket: Ticket | None) -> int:
        """The slot that the next post uses."""
        return self._num_posted % self._slots if ticket is None else ticket.slot

    def post(
        self, request: Collective, ticket: Ticket | None, payload: Any, counts: Sequence[int]
    ) -> Posted:
        """Copy `counts` bytes of the payload for each member into the slot and release it.

        Raises CapacityError, before anything is written, if they do not fit, and OrderError if
        this is not the rank's next post.
        """
        if ticket is not None and self._posts is not None:
            self._posts.admit(self._path, self._role, request, ticket)
        kind = at.GATHER if isinstance(request, Gather) else at.EXCHANGE
        if ticket is None:
            nth, stage = self._num_posted, self._crc(request.stage)
            posted = Posted(nth % self._slots, nth, self._epoch, nth, stage, kind)
        else:
            posted = self._posted(ticket, kind)
        num_bytes = counts[0] if kind == at.GATHER else sum(counts)
        if num_bytes > self._capacity:
            raise self._too_large(posted, num_bytes)
        visible_at = 0 if self._link is None else self._send(self._link, posted, counts)
        self._window.post(*posted, payload, counts, visible_at)
        self._num_posted += 1
        return posted

    def poll(self, posted: Posted) -> bool:
        """Whether `take` would find everybody's message."""
        found = self._window.poll(posted.slot, posted.comm_seq)
        if found > 0:
            self.waiter.due(found)
        return found == 0

    def watch(self, posted: Posted) -> object | None:
        """Tells without Python what `poll` tells (watch.h); None without the C++."""
        return self._window.watch(posted.slot, posted.comm_seq)

    def take(self, posted: Posted, counts: Sequence[int], out: Any) -> None:
        """Copy the members' parts, `counts` bytes each, to `out`; waits for those that miss.

        Raises DivergedError if a header is not this collective's or the slot was written over,
        CanaryError if somebody else wrote into it.
        """
        fault = self._window.take(*posted, counts, out)
        if fault is not None and fault[0] == at.NOT_THERE:
            self._wait(posted)
            fault = self._window.take(*posted, counts, out)
        if fault is not None:
            raise self._error(posted, counts, *fault)

    @property
    def can_cross(self) -> bool:
        """Whether there are crossings: no link delays messages, and the C++ carries them."""
        return self._crosses is not None and self._link is None

    def cross(self, tickets: Sequence[Ticket], among: Sequence[Ticket]) -> Crossing:
        """The messages of these tickets, exchanges all, for a pass that computes between them.
        `among`: they and those of other channels that are crossed meanwhile, in order.

        Raises OrderError if `among` are not the rank's next posts, or the tickets none of them.
        """
        assert self._crosses is not None
        if self._posts is not None:
            self._posts.admit_all(self._path, self._role, tickets, among)
        self._num_posted += len(tickets)
        if tickets[-1].op.crc not in self._stages:
            self._stages.update({ticket.op.crc: ticket.op.stage for ticket in tickets})

        def error(nth: int, fault: tuple[int, int, int, bytes]) -> CommunicationError:
            posted = self._posted(tickets[nth], at.EXCHANGE)
            code, member, num_bytes, raw = fault
            if code == at.OVER_CAPACITY:
                return self._too_large(posted, num_bytes)
            owed = [0] * len(self.members)
            owed[member] = num_bytes
            return self._error(posted, owed, code, member, raw)

        native = self._crosses(self._window, packed(tickets, at.EXCHANGE))
        return Crossing(native, timeout_s=self.timeout_s, error=error)

    def _posted(self, ticket: Ticket, kind: int) -> Posted:
        op = ticket.op
        if op.crc not in self._stages:
            self._stages[op.crc] = op.stage
        return Posted(ticket.slot, ticket.comm_seq, ticket.epoch, ticket.seq, op.crc, kind)

    def _crc(self, stage: str) -> int:
        found = zlib.crc32(stage.encode())
        self._stages[found] = stage
        return found

    def _too_large(self, posted: Posted, num_bytes: int) -> CapacityError:
        return CapacityError(
            f"{self._where(posted)}: a message of {num_bytes:,} bytes does not fit into a slot "
            f"of {self._capacity:,}: raise {self._enlarge}"
        )

    def _send(self, link: Link, posted: Posted, counts: Sequence[int]) -> int:
        """When the others see it; what it delays on the link is told to its windows."""
        num_bytes = sum(counts) - counts[self.me]
        if len(self.members) == 1:
            return 0
        *delayed, own = link.send(
            self._clock(), num_bytes, (self._window, posted.slot, posted.comm_seq)
        )
        for (window, slot, comm_seq), at_ns in delayed:
            window.postpone(slot, comm_seq, at_ns)
        return own.at_ns

    def _wait(self, posted: Posted) -> None:
        deadline = self._clock() + int(self.timeout_s * 1e9)
        self.waiter.begin()
        while True:
            self.waiter.arm()
            if self.poll(posted):
                return
            if self._clock() > deadline:
                raise CollectiveTimeoutError(
                    f"no answer within {self.timeout_s:g} s: {self._where(posted)}"
                )
            self.waiter.wait(0.05)

    def _where(self, posted: Posted) -> str:
        return (
            f"rank {self._rank}: {self._path}/{self._role} of ranks {list(self.members)}: "
            f"{self._in_words(posted._asdict())}"
        )

    def _error(
        self, posted: Posted, counts: Sequence[int], code: int, member: int, raw: bytes
    ) -> CommunicationError:
        found = at.Header.unpack(raw, len(self.members))
        whose, where = f"rank {self.members[member]}'s slot {posted.slot}", self._where(posted)
        if code == at.CANARY:
            return CanaryError(
                f"{where}: {whose} was written by somebody else: a canary around its message "
                f"({found.num_bytes:,} bytes) is gone"
            )
        if code == at.OVERWRITTEN:
            return DivergedError(
                f"{where}: {whose} was written over before it was read: it holds message "
                f"{max(found.begun, found.released) - 1}"
            )
        other = {name: getattr(found, name) for name in Posted._fields if name != "slot"}
        names = [name for name in other if other[name] != getattr(posted, name)]
        for name, own in (("path", self._path), ("role", self._role)):
            if getattr(found, name) != zlib.crc32(own.encode()):
                names.append(name)
                other[name] = getattr(found, name)
        if not names:
            return DivergedError(
                f"{where}: {counts[member]:,} bytes are owed by rank {self.members[member]}, "
                f"whose message ({found.num_members} members) has {found.counts[self.me]:,}"
            )
        return DivergedError(
            f"{where}: {whose} holds another collective: {self._in_words(other)} "
            f"(differs in {', '.join(names)})"
        )

    def _in_words(self, header: Mapping[str, int]) -> str:
        stages = self._stages
        kinds = {number: name for name, number in at.KINDS.items()}
        words = [f"epoch {header['epoch']} seq {header['seq']} message {header['comm_seq']}"]
        words.append(kinds.get(header["kind"], f"kind {header['kind']}"))
        words.append(stages.get(header["stage"], f"stage with crc {header['stage']:08x}"))
        words += [
            f"of a {name} with crc {header[name]:08x}"
            for name in ("path", "role")
            if name in header
        ]
        return " ".join(words)


class ByteCommunicator:
    """Byte strings over a window: control messages, and any payload in tests and simulations.

    A gather's payloads are equally long on all members; an exchange's are rows of `row_bytes`,
    joined. Conforms to `Communicator`; the results are the caller's own.
    """

    def __init__(
        self, channel: WindowChannel, *, row_bytes: int = 1, timeout_s: float | None = None
    ) -> None:
        """`timeout_s`: the driver's deadline, by default the channel's."""
        self.timeout_s = channel.timeout_s if timeout_s is None else timeout_s
        self._channel, self._row_bytes = channel, row_bytes

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        payload: bytes = request.payload
        if isinstance(request, Gather):
            sent = owed = (len(payload),) * len(self._channel.members)
        else:
            sent = tuple(rows * self._row_bytes for rows in request.send)
            owed = tuple(rows * self._row_bytes for rows in request.recv)
        return self._channel.post(request, ticket, payload, sent), owed

    def poll(self, handle: Any) -> bool:
        return self._channel.poll(handle[0])

    def result(self, handle: Any) -> Any:
        """A list of every member's bytes; of an exchange, the received rows, joined."""
        posted, owed = handle
        out = bytearray(sum(owed))
        self._channel.take(posted, owed, out)
        if posted.kind == at.EXCHANGE:
            return bytes(out)
        size = owed[0]
        return [bytes(out[size * nth : size * (nth + 1)]) for nth in range(len(owed))]

    def abort(self) -> None:
        """Nothing is in flight but bytes in memory."""
