"""What a rank is doing right now, told while it happens to whoever may have to explain a hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .crossing import Moments
from .path import Ticket


class Progress(Protocol):
    """Told by the sequencer and the driver; must be cheap, and never wait."""

    def computing(self, ticket: Ticket) -> None:
        """The ticket's path computes towards this collective."""
        ...

    def posted(self, ticket: Ticket) -> None:
        """The collective was posted."""
        ...

    def settled(self, ticket: Ticket) -> None:
        """Its result was taken."""
        ...

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Moments]) -> None:
        """All of that for tickets one behind the other, when it is over."""
        ...

    def waiting(self, where: str) -> None:
        """The rank waits, for what `where` says in words."""
        ...

    def going_on(self) -> None:
        """The wait is over."""
        ...


class NoProgress:
    """Nobody asks."""

    def computing(self, ticket: Ticket) -> None: ...

    def posted(self, ticket: Ticket) -> None: ...

    def settled(self, ticket: Ticket) -> None: ...

    def crossed(self, tickets: Sequence[Ticket], moments: Sequence[Moments]) -> None: ...

    def waiting(self, where: str) -> None: ...

    def going_on(self) -> None: ...
