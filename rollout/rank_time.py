"""Where a rank's time went: computing for each path, in host code, waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from interlace.comm.journal import StepRecord, TicketRecord

Spans = Sequence[tuple[float, float]]
"""Beginnings and ends, in seconds."""


def shares_over_time(
    steps: Sequence[StepRecord],
    tickets: Sequence[TicketRecord],
    paths: Sequence[str],
    edges: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """Per bin, the share computed for each path and, last, spent in host code; the rest waited."""
    width = np.diff(edges)
    shares = {
        name: covered([span for t in tickets if t.path == name for span in t.computing], edges)
        for name in paths
    }
    in_steps = covered([(step.began_at, step.ended_at) for step in steps], edges)
    busy = sum(shares.values(), covered(waits(steps, tickets), edges))
    shares["host"] = np.maximum(in_steps - busy, 0.0)
    return {name: share / width for name, share in shares.items()}


def waits(
    steps: Sequence[StepRecord], tickets: Sequence[TicketRecord]
) -> list[tuple[float, float]]:
    """When the rank only waited: at the end of collectives, and at the beginning of a step.

    What a step waited beyond its collectives it waited in its exchange or parked.
    """
    spans = [(ticket.settled_at - ticket.waited_s, ticket.settled_at) for ticket in tickets]
    starts = np.array([step.began_at for step in steps])
    of_step = np.searchsorted(starts, [stop for _, stop in spans], side="right") - 1
    in_tickets = np.zeros(len(steps))
    np.add.at(in_tickets, of_step, [ticket.waited_s for ticket in tickets])
    for step, counted in zip(steps, in_tickets.tolist(), strict=True):
        spans.append((step.began_at, step.began_at + max(0.0, step.waited_s - counted)))
    return spans


def covered(spans: Spans, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of each bin that lie in the spans (overlapping ones count twice)."""
    passed = np.zeros_like(edges)
    for side, sign in ((0, 1), (1, -1)):
        points = np.sort(np.array([span[side] for span in spans], np.float64)) - edges[0]
        before = np.searchsorted(points, edges - edges[0])
        sums = np.concatenate([[0.0], np.cumsum(points)])
        passed += sign * ((edges - edges[0]) * before - sums[before])
    return np.diff(passed)


def common_s(spans: Spans, others: Spans) -> float:
    """Seconds of `spans`, which do not overlap, that lie in any of `others`, which may."""
    if not spans or not others:
        return 0.0
    merged: list[list[float]] = []
    for start, stop in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    starts, stops = np.array(merged, np.float64).T
    before = np.concatenate([[0.0], np.cumsum(stops - starts)])

    def until(times: NDArray[np.float64]) -> NDArray[np.float64]:
        index = np.searchsorted(starts, times, side="right") - 1
        inside = np.minimum(times, stops[index]) - starts[index]
        return np.where(index < 0, 0.0, before[index] + inside)

    begins, ends = np.array(spans, np.float64).T
    return float((until(ends) - until(begins)).sum())
