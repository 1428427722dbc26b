"""How prefill and decode shared the ranks: the few numbers every comparison of modes needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias

from interlace.comm.journal import StepRecord, TicketRecord

PREFILL, DECODE, TRANSFER = "prefill", "decode", "transfer"

Records: TypeAlias = Mapping[int, tuple[Sequence[StepRecord], Sequence[TicketRecord]]]
"""What each rank recorded, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts are of tickets (one ticket = one collective boundary); shares are 0 to 1.

    Where ranks step in several engines (mode replicas) a share and a mean per step is over the
    steps of all of them, so an engine counts as often as it steps; a number is a sum, a maximum
    that of the worst.
    """

    coexisting_steps_share: float
    """Of the steps with tickets, those with tickets of more than one path that computes."""
    decode_gap_max: int
    """Most prefill tickets decode had to let pass before its next ticket, while any rank decodes.

    Counted from the previous decode ticket, or from the step in which somebody began to decode. 0
    where no rank takes part in both, since then nobody's ticket passes another's.
    """
    prefill_gap_max: int
    """Most decode tickets between two tickets of one prefill forward pass, by the same rule."""
    alternations_per_step: float
    """Mean number of changes between paths that compute inside a step with tickets."""
    prefills_spanning_steps: int
    """Prefill forward passes with tickets in more than one step."""
    preemptions: int
    """Turns that gave their KV blocks back and were prefilled again."""
    recomputed_tokens: int
    """Rows prefilled of tokens that their trajectory had forwarded before."""
    kv_bytes_moved: int
    """Keys and values sent from rank to rank."""
    kv_blocks_moved: int
    """The same in blocks, a tensor-parallel rank's share of one counting as one."""
    tickets_per_step: float
    """Mean over steps with tickets."""
    control_bytes_per_step: float
    """Mean over all steps of all ranks, bytes a rank sent."""
    idle_share: Mapping[int, float]
    """Per rank: waited (exchange, collectives, parked) of the time from first step to last."""


def figures(records: Records) -> Figures:
    """Compute the figures; the agreed ones come out equal from every rank's records of an engine,
    or it raises.

    A rank outside a path records no tickets of it, so the order is put together from all ranks.
    Where prefill and decode have different ranks, that they coexist in a step says only that no
    rank goes on to the next one before both are done with it. ValueError naming rank and figure if
    ranks disagree, or if a rank's tickets are not those its steps count (a bounded journal
    forgets), or if there are no steps.
    """
    if not records or not all(steps for steps, _ in records.values()):
        empty = [rank for rank, (steps, _) in sorted(records.items()) if not steps]
        raise ValueError(f"no steps to compute figures from (ranks without: {empty or 'all'})")
    counts = [_counts({rank: records[rank] for rank in engine}) for engine in engines(records)]
    num_busy = max(1, sum(one.num_busy for one in counts))
    all_steps = [step for own, _ in records.values() for step in own]
    return Figures(
        coexisting_steps_share=sum(one.coexisting for one in counts) / num_busy,
        decode_gap_max=max(one.decode_gap for one in counts),
        prefill_gap_max=max(one.prefill_gap for one in counts),
        alternations_per_step=sum(one.alternations for one in counts) / num_busy,
        prefills_spanning_steps=sum(one.spanning for one in counts),
        preemptions=sum(step.preempted for step in all_steps),
        recomputed_tokens=sum(step.recomputed for step in all_steps),
        kv_bytes_moved=sum(step.kv_bytes for step in all_steps),
        kv_blocks_moved=sum(dict(step.rows).get(TRANSFER, 0) for step in all_steps),
        tickets_per_step=sum(one.num_tickets for one in counts) / num_busy,
        control_bytes_per_step=sum(step.control_bytes for step in all_steps) / len(all_steps),
        idle_share={rank: _idle_share(own) for rank, (own, _) in sorted(records.items())},
    )


def engines(records: Records) -> list[tuple[int, ...]]:
    """Ranks that step together, as their tickets tell: each set shares collectives with no other.

    A rank without any ticket stands alone.
    """
    found: list[set[int]] = []
    for rank, (_, tickets) in sorted(records.items()):
        together = {rank}.union(*{ticket.members for ticket in tickets})
        apart = [ranks for ranks in found if ranks.isdisjoint(together)]
        found = [*apart, together.union(*(ranks for ranks in found if ranks not in apart))]
    return sorted(tuple(sorted(ranks.intersection(records))) for ranks in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of one engine; `num_busy` counts its steps with tickets."""

    num_busy: int
    num_tickets: int
    coexisting: int
    alternations: int
    spanning: int
    decode_gap: int
    prefill_gap: int


def _counts(records: Records) -> _Counts:
    steps, tickets = _agreed(records)
    paths_by_step = {
        step: [ticket.path for ticket in group]
        for step, group in groupby(tickets, key=lambda ticket: ticket.step)
    }
    computing = {
        step: [path for path in paths if path != TRANSFER] for step, paths in paths_by_step.items()
    }
    prefill_gap, spanning = _prefills(steps, computing)
    decode_gap = _decode_gap(steps, computing)
    if all(len({ticket.path for ticket in own} - {TRANSFER}) < 2 for _, own in records.values()):
        decode_gap = prefill_gap = 0
    return _Counts(
        num_busy=len(paths_by_step),
        num_tickets=len(tickets),
        coexisting=sum(len(set(paths)) > 1 for paths in computing.values()),
        alternations=sum(a != b for paths in computing.values() for a, b in pairwise(paths)),
        spanning=spanning,
        decode_gap=decode_gap,
        prefill_gap=prefill_gap,
    )


def _idle_share(steps: Sequence[StepRecord]) -> float:
    total = steps[-1].ended_at - steps[0].began_at
    return sum(step.waited_s for step in steps) / total if total > 0 else 0.0


def _decode_gap(steps: Sequence[StepRecord], paths_by_step: Mapping[int, list[str]]) -> int:
    """In serial mode decode waits through whole prefill steps; `decoding` says that it waits."""
    largest = passed = 0
    for step in steps:
        if step.decoding == 0:
            passed = 0
            continue
        for path in paths_by_step.get(step.step, ()):
            if path == PREFILL:
                passed += 1
            elif path == DECODE:
                largest = max(largest, passed)
                passed = 0
    return largest


def _prefills(
    steps: Sequence[StepRecord], paths_by_step: Mapping[int, list[str]]
) -> tuple[int, int]:
    """Largest gap inside a prefill, and how many lie in several steps.

    A path starts at most once a step and never before its last forward pass ended, so all prefill
    tickets from one start to the next belong to one forward pass.
    """
    largest = passed = spanning = steps_of_this = 0
    begun = False
    for step in steps:
        if PREFILL in step.started:
            spanning += steps_of_this > 1
            steps_of_this, begun = 0, False
        paths = paths_by_step.get(step.step, ())
        steps_of_this += PREFILL in paths
        for path in paths:
            if path == DECODE:
                passed += 1
            elif path == PREFILL:
                if begun:
                    largest = max(largest, passed)
                passed, begun = 0, True
    return largest, spanning + (steps_of_this > 1)


def _agreed(records: Records) -> tuple[Sequence[StepRecord], list[TicketRecord]]:
    """One rank's steps and every ticket once, in global order, after checking all ranks agree."""
    first = min(records)
    steps = records[first][0]
    by_seq: dict[int, TicketRecord] = {}
    for rank, (own_steps, own_tickets) in sorted(records.items()):
        if len(own_steps) != len(steps):
            raise ValueError(
                f"rank {rank} recorded {len(own_steps)} steps, rank {first} {len(steps)}"
            )
        for theirs, step in zip(own_steps, steps, strict=True):
            for name in ("step", "version", "decoding", "started", "finished", "num_tickets"):
                if getattr(theirs, name) != getattr(step, name):
                    raise ValueError(
                        f"rank {rank}, step {step.step}: {name} is {getattr(theirs, name)}, "
                        f"on rank {first} {getattr(step, name)}"
                    )
        for ticket in own_tickets:
            known = by_seq.setdefault(ticket.seq, ticket)
            if known is not ticket:
                for name in ("step", "path", "role", "stage", "comm_seq"):
                    if getattr(known, name) != getattr(ticket, name):
                        raise ValueError(
                            f"rank {rank}, ticket {ticket.seq}: {name} is {getattr(ticket, name)}, "
                            f"on another rank {getattr(known, name)}"
                        )
        _check_counts(rank, own_steps, own_tickets)
    return steps, [by_seq[seq] for seq in sorted(by_seq)]


def _check_counts(rank: int, steps: Sequence[StepRecord], tickets: Sequence[TicketRecord]) -> None:
    """A rank holds all tickets of a path it takes part in."""
    counts: dict[tuple[int, str], int] = {}
    for ticket in tickets:
        key = ticket.step, ticket.path
        counts[key] = counts.get(key, 0) + 1
    own_paths = {path for _, path in counts}
    for step in steps:
        for path, num in step.num_tickets:
            found = counts.pop((step.step, path), 0)
            if path in own_paths and found != num:
                raise ValueError(
                    f"rank {rank}, step {step.step}: num_tickets of {path} is {num}, "
                    f"recorded are {found} (was the journal bounded?)"
                )
    if counts:
        step_number, path = min(counts)
        raise ValueError(
            f"rank {rank}, step {step_number}: {counts[step_number, path]} tickets of {path} "
            "that no step counts"
        )
