"""How long decode had to wait: from being ready to go on until its first collective was on its way.

A forward pass of decode is ready when the one before it has its last result, or when somebody
begins to decode. It is issued when it starts to compute. In between lie sampling, the exchange and
whatever of prefill goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.rollout.figures import DECODE, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWaits:
    """Over all forward passes of decode on all ranks, in seconds; 0 where there was none."""

    num: int
    p50_s: float
    p99_s: float
    max_s: float


def decode_waits(records: Records) -> DecodeWaits:
    """The waits of all ranks that decode."""
    waits = [wait for steps, tickets in records.values() for wait in _waits(steps, tickets)]
    if not waits:
        return DecodeWaits(num=0, p50_s=0.0, p99_s=0.0, max_s=0.0)
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return DecodeWaits(num=len(waits), p50_s=p50, p99_s=p99, max_s=max(waits))


def _waits(steps: Sequence[StepRecord], tickets: Sequence[TicketRecord]) -> list[float]:
    first: dict[int, TicketRecord] = {}
    last: dict[int, TicketRecord] = {}
    for ticket in sorted(tickets, key=lambda ticket: ticket.seq):
        if ticket.path == DECODE:
            first.setdefault(ticket.step, ticket)
            last[ticket.step] = ticket
    waits, ready = [], None
    for step in steps:
        if not step.decoding:
            ready = None
            continue
        if ready is None:
            ready = step.began_at
        if step.step in first:
            waits.append(max(0.0, first[step.step].resumed_at - ready))
            ready = last[step.step].settled_at
    return waits
