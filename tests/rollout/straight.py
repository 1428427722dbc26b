"""Which forward passes of a job went through all their collectives in one call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from interlace.comm.journal import TicketRecord


def straight_passes(tickets: Iterable[TicketRecord]) -> dict[str, list[bool]]:
    """Of one rank's journal, path by path: whether each pass went straight.

    Then a computation begins to the digit when the message before it has settled.
    """
    passes: dict[str, list[list[TicketRecord]]] = {}
    for ticket in tickets:
        of_path = passes.setdefault(ticket.path, [])
        if ticket.stage == "0.counts":
            of_path.append([])
        of_path[-1].append(ticket)
    return {
        path: [all(a.settled_at == b.resumed_at for a, b in pairwise(one)) for one in of_path]
        for path, of_path in passes.items()
    }


def beside(tickets: Iterable[TicketRecord]) -> list[list[str]]:
    """Of one rank's journal: the paths of the tickets of each step that has several, in order."""
    steps: dict[int, list[TicketRecord]] = {}
    for ticket in tickets:
        steps.setdefault(ticket.step, []).append(ticket)
    each = [[t.path for t in sorted(own, key=lambda t: t.seq)] for own in steps.values()]
    return [paths for paths in each if len(set(paths)) > 1]
