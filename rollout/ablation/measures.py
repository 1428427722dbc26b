"""What one run is reduced to: figures as JSON values, small enough to keep hundreds of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.rollout.figures import DECODE, PREFILL, Records
from interlace.rollout.latencies import Asked, latencies, token_times
from interlace.rollout.rank_time import common_s, shares_over_time

NUM_BINS = 160
NUM_POINTS = 200
BULK = 0.9
"""Until so much of all tokens is sampled a run is in its bulk; what is left is its tail."""


def measure(
    records: Records,
    asked: Asked,
    finished_at: Sequence[float],
    *,
    began_at: float,
    policy: str = "plan",
) -> dict[str, Any]:
    """The figures of a run that its summary does not have.

    `asked`, `finished_at` (one time a trajectory) and `began_at` by the clock of the records. What
    ranks did before and after it, waiting for environments to start and for the word to stop, is
    left out.
    """
    records = within(records, began_at, max(finished_at, default=began_at))
    steps = [step for own, _ in records.values() for step in own]
    found = latencies(records, asked)
    sampled_at = sorted(at for at, _ in token_times(records))
    return {
        "ranks": {str(rank): rank_shares(*own) for rank, own in sorted(records.items())},
        "phases": phases(records),
        "first_token_s": {"p50": found.first_token_p50_s, "p99": found.first_token_p99_s},
        "between_tokens_s": {"p50": found.between_tokens_p50_s, "p99": found.between_tokens_p99_s},
        "exchanges": num_exchanges(records, policy),
        "tickets": sum(len({ticket.seq for ticket in own}) for _, own in records.values())
        // max(1, len(records)),
        "control_bytes": sum(step.control_bytes for step in steps),
        "kv_bytes": sum(step.kv_bytes for step in steps),
        "recomputed_tokens": sum(step.recomputed for step in steps),
        "tail": tail(sampled_at, max(finished_at, default=began_at), began_at),
        "curve": curve(sampled_at, finished_at, began_at),
        "timeline": timeline(records),
    }


def within(records: Records, began_at: float, ended_at: float) -> Records:
    """The steps that lie at least partly between the two, and their tickets; all if none do."""
    kept = {}
    for rank, (steps, tickets) in records.items():
        own = [s for s in steps if s.ended_at > began_at and s.began_at < ended_at]
        numbers = {step.step for step in own}
        kept[rank] = own, [ticket for ticket in tickets if ticket.step in numbers]
    return kept if all(steps for steps, _ in kept.values()) else records


def rank_shares(steps: Sequence[StepRecord], tickets: Sequence[TicketRecord]) -> dict[str, float]:
    """Of one rank's time from its first step to its last, by what it did.

    Every path's name: computing for it. `overlap`: computing for one path while a collective of
    another is in flight (part of the former). `idle`: waiting for collectives and exchanges or
    parked; `parked` is the part of it in steps in which no rank had work. `host`: the rest.
    """
    total = steps[-1].ended_at - steps[0].began_at if steps else 0.0
    if total <= 0:
        return {"overlap": 0.0, "idle": 0.0, "parked": 0.0, "host": 0.0}
    by_path: dict[str, list[TicketRecord]] = defaultdict(list)
    for ticket in tickets:
        by_path[ticket.path].append(ticket)
    computing = {
        name: [span for ticket in own for span in ticket.computing] for name, own in by_path.items()
    }
    overlap = sum(
        common_s(
            computing[name],
            [(t.posted_at, t.settled_at) for t in tickets if t.path != name],
        )
        for name in computing
    )
    busy = {name: sum(b - a for a, b in spans) for name, spans in sorted(computing.items())}
    idle = sum(step.waited_s for step in steps)
    parked = sum(step.waited_s for step in steps if step.parked_ms)
    spent = {**busy, "overlap": overlap, "idle": idle, "parked": parked}
    shares = {name: seconds / total for name, seconds in spent.items()}
    shares["host"] = max(0.0, 1.0 - sum(busy.values()) / total - idle / total)
    return shares


def phases(records: Records) -> dict[str, dict[str, float]]:
    """Time by what a step held, a mean over ranks, and the tickets in it.

    `prefill`, `decode` and others: steps of one path alone; `both`: prefill and decode together;
    `none`: steps without tickets.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    num_ranks = len(records)
    for steps, _ in records.values():
        for step in steps:
            here = {name: num for name, num in step.num_tickets if num}
            kind = "both" if {PREFILL, DECODE} <= here.keys() else "+".join(sorted(here)) or "none"
            phase = found[kind]
            phase["seconds"] += (step.ended_at - step.began_at) / num_ranks
            phase["steps"] += 1 / num_ranks
            for name, num in here.items():
                phase[name] += num / num_ranks
    return {kind: dict(values) for kind, values in sorted(found.items())}


def num_exchanges(records: Records, policy: str) -> int:
    """How often all ranks had to meet: once a step and, with a turnstile, once more in steps of
    both paths."""
    steps, _ = records[min(records)]
    if policy != "turnstile":
        return len(steps)
    return len(steps) + sum(sum(num > 0 for _, num in step.num_tickets) > 1 for step in steps)


def tail(sampled_at: Sequence[float], ended_at: float, began_at: float) -> dict[str, float]:
    """The run in two: until `BULK` of all tokens is sampled, and after it."""
    if not sampled_at:
        return {"bulk_s": ended_at - began_at, "tail_s": 0.0}
    turn = sampled_at[min(len(sampled_at) - 1, int(BULK * len(sampled_at)))]
    return {"bulk_s": turn - began_at, "tail_s": max(0.0, ended_at - turn)}


def curve(
    sampled_at: Sequence[float], finished_at: Sequence[float], began_at: float
) -> dict[str, list[float]]:
    """Shares of all tokens sampled and of all trajectories finished, over time."""
    end = max([*sampled_at[-1:], *finished_at, began_at])
    times = np.linspace(began_at, end, NUM_POINTS + 1)

    def share(moments: Sequence[float]) -> list[float]:
        done = np.searchsorted(np.sort(np.array(moments, np.float64)), times, side="right")
        return [round(value, 4) for value in (done / max(1, len(moments))).tolist()]

    return {
        "seconds": [round(value, 4) for value in (times - began_at).tolist()],
        "tokens": share(sampled_at),
        "trajectories": share(finished_at),
    }


def timeline(records: Records) -> dict[str, Any]:
    """Per rank and slice of time, the shares spent computing for each path and in host code."""
    zero = min(steps[0].began_at for steps, _ in records.values())
    end = max(steps[-1].ended_at for steps, _ in records.values())
    edges = np.linspace(zero, max(end, zero + 1e-6), NUM_BINS + 1)
    ranks = {}
    for rank, (steps, tickets) in sorted(records.items()):
        paths = sorted({ticket.path for ticket in tickets})
        shares = shares_over_time(steps, tickets, paths, edges)
        ranks[str(rank)] = {
            name: [round(value, 3) for value in share.tolist()] for name, share in shares.items()
        }
    return {"seconds": end - zero, "ranks": ranks}
