"""What must be true of a run that came to its end. Each check raises a `Violation`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from interlace.comm.path import Path
from interlace.comm.plan import StepPlan
from interlace.rollout.messages import TurnRequest, TurnResult

from .simulation import Simulation
from .toy_model import expected
from .violation import Violation


def check(run: Simulation) -> None:
    """Everything a run of any scenario promises, once it has ended."""
    one_order(run)
    one_plan(run)
    bounded_bypass(run)
    no_vain_prefill(run)
    every_turn_once(run)
    nothing_left(run)


def one_order(run: Simulation) -> None:
    """All ranks posted the same tickets in one order, which is that of their numbers."""
    first, *others = run.book.tickets
    for rank, tickets in enumerate(others, start=1):
        if tickets != first:
            at = next(
                (i for i, (a, b) in enumerate(zip(first, tickets, strict=False)) if a != b), 0
            )
            raise Violation(
                f"rank {rank} posted {len(tickets)} tickets, rank 0 {len(first)}; "
                f"they differ from place {at} on: {tickets[at : at + 2]}, {first[at : at + 2]}"
            )
    numbers = [seq for _, seq, *_ in first]
    if any(one >= other for one, other in itertools.pairwise(numbers)):
        raise Violation(f"tickets were not posted in the order of their numbers: {numbers}")
    if run.world.violations:
        raise Violation(run.world.violations[0])


def one_plan(run: Simulation) -> None:
    """Starts, drops, updates and the end fell into the same step everywhere."""
    first = _decisions(run.book.plans[0])
    for rank, plans in enumerate(run.book.plans):
        if _decisions(plans) != first:
            raise Violation(f"rank {rank} and rank 0 went by different plans")
    hashes = {sequencer.hashes[-1] for sequencer in run.sequencers}
    if len(hashes) > 1:
        raise Violation("the ranks walked different plans")
    installed = run.book.installed
    if any(one != installed[0] for one in installed):
        raise Violation(f"versions were installed at different steps: {installed}")


def _decisions(plans: Sequence[StepPlan]) -> list[tuple[object, ...]]:
    return [(p.step, p.version, p.start, p.drop, p.finish, p.update, p.stop) for p in plans]


def bounded_bypass(run: Simulation) -> None:
    """Prefill passes decode a bounded number of times, and moves in every step it has begun."""
    if run.scenario.mode != "multiplexed":
        return
    prefill = next(path for path in run.config.paths if path.work == ("prefill",))
    most = math.ceil(len(prefill.program) / run.scenario.chunk_steps)
    for plan in run.book.plans[0]:
        _bypass(plan, prefill, most)


def _bypass(plan: StepPlan, prefill: Path, most: int) -> None:
    passed, seen_decode = 0, False
    num_prefill = plan.count(prefill.name)
    for ticket in plan.tickets:
        if ticket.path != prefill.name:
            passed, seen_decode = 0, True
        elif seen_decode:
            passed += 1
            if passed > most and not plan.update:
                raise Violation(f"step {plan.step}: {passed} prefill boundaries, {most} allowed")
    if plan.decoding and not plan.update and num_prefill > most:
        raise Violation(f"step {plan.step}: {num_prefill} prefill boundaries, {most} allowed")
    going = prefill.name in dict(plan.after.position) or prefill.name in plan.finish
    if going and not num_prefill:
        raise Violation(f"step {plan.step}: a prefill in flight did not move")


def no_vain_prefill(run: Simulation) -> None:
    """A prefill is dropped because turns were aborted, once for each at most: who waits behind
    an aborted turn does not wait for it for ever."""
    drops = [plan.step for plan in run.book.plans[0] if plan.drop]
    aborted = run.aborted
    if len(drops) > len(aborted):
        raise Violation(f"prefill was dropped in steps {drops}, {len(aborted)} turns were aborted")


def every_turn_once(run: Simulation) -> None:
    """Every turn asked for ended once, with the tokens it must have, each of its own version."""
    ends = Counter((result.trajectory, result.turn) for result in run.book.results)
    asked = Counter((request.trajectory, request.turn) for request in run.requests)
    if ends != asked:
        raise Violation(f"turns asked for {sorted(asked.items())}, ended {sorted(ends.items())}")
    if run.unasked:
        raise Violation(f"the ranks left before trajectories {run.unasked} had all their turns")
    requests = {(request.trajectory, request.turn): request for request in run.requests}
    aborted = run.aborted
    for result in run.book.results:
        right(run.scenario.layers, requests[result.trajectory, result.turn], result)
        if result.finish == "aborted" and result.trajectory not in aborted:
            raise Violation(f"trajectory {result.trajectory} was aborted by nobody")
        if result.versions != sorted(result.versions):
            raise Violation(f"trajectory {result.trajectory}: versions {result.versions}")


def right(layers: int, request: TurnRequest, result: TurnResult) -> None:
    """The result is the one its request has in any schedule; an aborted one's are its beginning."""
    tokens, experts = expected(layers, request.token_ids, request.sampling.max_tokens)
    whole = result.finish != "aborted"
    if result.token_ids != (tokens if whole else tokens[: len(result.token_ids)]):
        raise Violation(
            f"trajectory {result.trajectory} turn {result.turn} ({result.finish}): "
            f"tokens {result.token_ids}, expected {tokens}"
        )
    if len(result.versions) != len(result.token_ids):
        raise Violation(f"trajectory {result.trajectory}: a token without a version")
    if result.experts != experts[: len(result.experts)]:
        raise Violation(f"trajectory {result.trajectory}: experts of other rows")


def nothing_left(run: Simulation) -> None:
    """Every collective was taken, every block is back, no forward pass is in flight."""
    for rank, sequencer in enumerate(run.sequencers):
        posted, settled = len(run.book.tickets[rank]), len(sequencer.journal.tickets)
        if posted != settled:
            raise Violation(f"rank {rank} posted {posted} collectives and took {settled} results")
        if run.engines[rank].state.position:
            raise Violation(f"rank {rank} left with {run.engines[rank].state.position} in flight")
    for rank, scheduler in run.schedulers.items():
        blocks = scheduler.blocks
        blocks.check_integrity()
        if blocks.num_available != blocks.num_blocks:
            raise Violation(
                f"rank {rank}: {blocks.num_available} of {blocks.num_blocks} blocks came back"
            )
