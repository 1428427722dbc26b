"""The last look at a post before data moves: one witness a rank, for all its communicators."""

from __future__ import annotations

from collections.abc import Sequence

from .collectives import Collective
from .errors import OrderError
from .path import Ticket


class PostOrder:
    """What reaches a rank's device, on whatever communicator, is in the agreed order.

    Messages of one communicator are numbered, so its members see whether they agree among
    themselves; that two communicators change places, no header can show. Here every post of the
    rank passes: its seq must be above the last one's, its ticket one of the communicator it is
    posted on, and its request the one that the path's forward pass has made. Together with
    headers, which say that members mean the same seq, this is the one order on all devices.
    """

    def __init__(self, rank: int, *, epoch: int = 0) -> None:
        """`epoch`: of the set of communicators that share this; tickets of others are refused."""
        self.rank, self.epoch = rank, epoch
        self._seq = -1
        self._last: Ticket | None = None
        self._among: Sequence[Ticket] = ()
        self._left: set[int] = set()
        self._asked: dict[str, Collective] = {}

    def asked(self, path: str, request: Collective) -> None:
        """The path's forward pass has made this request; the next post of the path must bring it.

        Where nobody says so, requests are not compared.
        """
        self._asked[path] = request

    def admit(self, path: str, role: str, request: Collective, ticket: Ticket) -> None:
        """Called by the communicator of (path, role) before it does anything. Raises OrderError,
        naming this ticket and the one posted before it."""
        if self._is_next(path, role, ticket) and self._asked.pop(path, request) is request:
            self._seq, self._last = ticket.seq, ticket
            return
        raise OrderError(f"rank {self.rank}: {self._why(path, role, ticket)}: nothing was posted")

    def admit_all(
        self, path: str, role: str, tickets: Sequence[Ticket], among: Sequence[Ticket]
    ) -> None:
        """The same of posts whose requests are made on the way. `among`: these and what is posted
        in between, in order; each of their communicators is to bring the same, and its own."""
        if among is not self._among:
            for ticket in among:
                if ticket.seq <= self._seq or ticket.epoch != self.epoch:
                    raise OrderError(f"rank {self.rank}: {self._why(path, role, ticket)}")
                self._seq, self._last = ticket.seq, ticket
            self._among, self._left = among, {ticket.seq for ticket in among}
        left = self._left
        for ticket in tickets:
            if ticket.path != path or ticket.op.role != role or ticket.seq not in left:
                raise OrderError(f"rank {self.rank}: {self._why(path, role, ticket)}")
            left.remove(ticket.seq)

    def _is_next(self, path: str, role: str, ticket: Ticket) -> bool:
        return (
            ticket.seq > self._seq
            and ticket.path == path
            and ticket.op.role == role
            and ticket.epoch == self.epoch
        )

    def _why(self, path: str, role: str, ticket: Ticket) -> str:
        if ticket.epoch != self.epoch:
            return f"{ticket}: these are the communicators of epoch {self.epoch}"
        if (ticket.path, ticket.op.role) != (path, role):
            return f"{ticket}: this is the communicator of {path}/{role}; after {self._last}"
        if ticket.seq <= self._seq:
            return f"{ticket} comes after {self._last}"
        return f"{ticket}: the request is not the one that {path} has made; after {self._last}"
