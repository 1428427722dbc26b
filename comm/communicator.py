"""What the sequencer asks of a transport."""

from __future__ import annotations

from typing import Any, Protocol

from .collectives import Collective
from .path import Ticket


class Communicator(Protocol):
    """One group of one (path, role). No two paths share one.

    A payload handed to `post` belongs to the communicator until its result is taken. A result may
    alias a receive slot: it holds until `slots` further collectives were posted here.
    """

    timeout_s: float
    """How long a driver may wait for one collective before it is an error."""

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        """Start the collective and return a handle at once."""
        ...

    def poll(self, handle: Any) -> bool:
        """Whether `result` would return without waiting."""
        ...

    def result(self, handle: Any) -> Any:
        """The answer to the request; call once."""
        ...

    def abort(self) -> None:
        """Give up everything in flight; the communicator is not used again."""
        ...
