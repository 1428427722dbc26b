"""Recorded runs without a run: the journal of ranks that follow one order over a slow link."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from interlace.comm.journal import StepRecord, TicketRecord

PATHS = {"P": "prefill", "D": "decode", "M": "mixed"}
COMPUTE_S = {"P": 2e-3, "D": 5e-4, "M": 2e-3}

Recorded = dict[int, tuple[list[StepRecord], list[TicketRecord]]]


def record_run(
    steps: Sequence[str],
    *,
    num_ranks: int = 2,
    decoding: Sequence[int] | None = None,
    latency_s: float = 1e-3,
    seed: int = 0,
) -> Recorded:
    """One string per step: P, D, M are tickets in order, "(" and ")" begin and end a prefill.

    A decode begins and ends in its step. Without `decoding`, one row decodes in steps with a D.
    """
    rng = random.Random(seed)
    members = tuple(range(num_ranks))
    records: Recorded = {rank: ([], []) for rank in members}
    now = dict.fromkeys(members, 100.0)
    outstanding: dict[str, dict[int, tuple[float, float]]] = {}
    heads: dict[str, dict[str, Any]] = {}
    comm_seq = dict.fromkeys(PATHS, 0)
    waited = dict.fromkeys(members, 0.0)
    seq = 0

    def settle(letter: str) -> None:
        posts = outstanding.pop(letter, {})
        ready = max((posted for _, posted in posts.values()), default=0.0) + latency_s
        for rank, (resumed, posted) in posts.items():
            wait = max(0.0, ready - now[rank])
            now[rank] += wait
            waited[rank] += wait
            records[rank][1].append(
                TicketRecord(
                    **heads[letter],
                    members=members,
                    resumed_at=resumed,
                    computed_at=posted,
                    posted_at=posted,
                    settled_at=now[rank],
                    waited_s=wait,
                )
            )

    for number, order in enumerate(steps):
        tickets = [letter for letter in order if letter in PATHS]
        began = dict(now)
        waited = dict.fromkeys(members, 0.0)
        for letter in tickets:
            settle(letter)
            heads[letter] = {
                "step": number,
                "seq": seq,
                "path": PATHS[letter],
                "role": "experts",
                "stage": ("dispatch", "combine")[comm_seq[letter] % 2],
                "comm_seq": comm_seq[letter],
            }
            seq += 1
            comm_seq[letter] += 1
            for rank in members:
                resumed = now[rank]
                now[rank] += COMPUTE_S[letter] * rng.uniform(0.5, 1.5)
                outstanding.setdefault(letter, {})[rank] = resumed, now[rank]
        finished = [letter for letter in "DM" if letter in tickets] + ["P"] * (")" in order)
        for letter in finished:
            settle(letter)
        parked = 0 if tickets else 5
        for rank in members:
            now[rank] += parked * 1e-3 + 2e-4
            records[rank][0].append(
                StepRecord(
                    step=number,
                    version=0,
                    began_at=began[rank],
                    ended_at=now[rank],
                    decoding=decoding[number] if decoding is not None else int("D" in order),
                    started=("prefill",) * ("(" in order) + ("decode",) * ("D" in order),
                    finished=tuple(PATHS[letter] for letter in finished),
                    rows=(("decode", 3 + rank),) * ("D" in order),
                    num_tickets=tuple((PATHS[x], tickets.count(x)) for x in PATHS if x in tickets),
                    control_bytes=72 + 8 * rank,
                    waited_s=waited[rank] + parked * 1e-3,
                    parked_ms=parked,
                )
            )
    for letter in list(outstanding):
        settle(letter)
    return records


@pytest.fixture(scope="session")
def recorded_run() -> Callable[..., Recorded]:
    return record_run
