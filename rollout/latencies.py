"""How long a turn waited for its first token, and each token for the next."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from interlace.rollout.figures import PREFILL, TRANSFER, Records

Asked = Sequence[tuple[int, float]]
"""Trajectory and time of every turn asked of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds over all turns and tokens; None where there was none."""

    first_token_p50_s: float | None
    first_token_p99_s: float | None
    between_tokens_p50_s: float | None
    between_tokens_p99_s: float | None


def token_times(records: Records) -> Iterator[tuple[float, int]]:
    """When a token was there, and its trajectory: at the end of the step that sampled it.

    Where other ranks prefill, the first token of a turn counts where it is decoded on.
    """
    counting = [
        steps
        for steps, tickets in records.values()
        if any(ticket.path not in (PREFILL, TRANSFER) for ticket in tickets)
    ]
    for steps in counting or [steps for steps, _ in records.values()]:
        for step in steps:
            for trajectory in step.sampled:
                yield step.ended_at, trajectory


def latencies(records: Records, asked: Asked) -> Latencies:
    """`asked` and the records by one clock. The first token counts from when its turn was asked."""
    tokens: dict[int, list[float]] = defaultdict(list)
    turns: dict[int, list[float]] = defaultdict(list)
    for at, trajectory in sorted(token_times(records)):
        tokens[trajectory].append(at)
    for trajectory, at in sorted(asked):
        turns[trajectory].append(at)
    first, between = [], []
    for trajectory, starts in turns.items():
        times = tokens[trajectory]
        places = [bisect_right(times, start) for start in starts]
        for start, (begin, end) in zip(starts, pairwise([*places, len(times)]), strict=True):
            own = times[begin:end]
            first += [at - start for at in own[:1]]
            between += [later - earlier for earlier, later in pairwise(own)]
    return Latencies(
        first_token_p50_s=_quantile(first, 0.5),
        first_token_p99_s=_quantile(first, 0.99),
        between_tokens_p50_s=_quantile(between, 0.5),
        between_tokens_p99_s=_quantile(between, 0.99),
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None
