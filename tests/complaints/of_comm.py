"""Mutations of what keeps ranks in order and finds who broke it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.complaints.mutation import Function, Mutation

from interlace.comm.path import Ticket
from interlace.comm.rank_status import ProcessState
from interlace.comm.verdict import Diagnosis, Verdict


def blames_nobody(diagnose: Function) -> Function:
    def changed(*args: Any, **kwargs: Any) -> Diagnosis:
        found = diagnose(*args, **kwargs)
        ranks = tuple(replace(rank, verdict=Verdict.WAITING) for rank in found.ranks)
        return replace(found, ranks=ranks)

    return changed


def looks_nowhere(in_words: Function) -> Function:
    return lambda frame: ""


def posts_anything(match: Function) -> Function:
    def changed(self: Any, ticket: Ticket, request: Any) -> Any:
        return match(self, ticket, request) if request is None else request

    return changed


def first_holder_decides(plan: Function) -> Function:
    def changed(state: Any, proposals: Sequence[Any], config: Any) -> Any:
        newest = max(proposal.update for proposal in proposals)
        return plan(state, [replace(one, update=newest) for one in proposals], config)

    return changed


def never_both(plan: Function) -> Function:
    return lambda state, proposals, config: plan(state, proposals, replace(config, mode="serial"))


def untried(warm: Function) -> Function:
    async def changed(*args: Any, **kwargs: Any) -> None:
        return None

    return changed


def compares_nothing(check: Function) -> Function:
    return lambda *args: None


def without_seq(roll: Function) -> Function:
    return lambda previous, ticket: roll(previous, replace(ticket, seq=0))


def forgets_the_last(admit: Function) -> Function:
    def changed(self: Any, *args: Any) -> None:
        self._seq = -1
        admit(self, *args)

    return changed


def looks_alive(process_state: Function) -> Function:
    return lambda pid, started: ProcessState.RUNNING


def one_set_of_buffers(workspace: Function) -> Function:
    def changed(self: Any, path: str) -> Any:
        made = workspace(self, path)
        first = next(iter(self._workspaces.values()))
        made._buffers, made._lent = first._buffers, first._lent
        return made

    return changed


MUTATIONS = (
    Mutation(
        name="a diagnosis blames nobody",
        target="interlace.comm.watchdog:diagnose",
        change=blames_nobody,
    ),
    Mutation(
        name="nobody looks where a rank stands",
        target="interlace.comm.watchdog:_in_words",
        change=looks_nowhere,
    ),
    Mutation(
        name="a request is posted whatever its ticket says",
        target="interlace.comm.sequencer:Sequencer._match",
        change=posts_anything,
    ),
    Mutation(
        name="the first rank that holds a version decides",
        target="interlace.comm.plan:plan",
        change=first_holder_decides,
    ),
    Mutation(
        name="prefill and decode never share a step",
        target="interlace.comm.agreement:plan",
        change=never_both,
    ),
    Mutation(
        name="groups are not tried before the first step",
        target="interlace.comm.warm:warm",
        change=untried,
    ),
    Mutation(
        name="hashes are not compared",
        target="interlace.comm.agreement:_check",
        change=compares_nothing,
    ),
    Mutation(
        name="hashes count each group for itself",
        target="interlace.comm.sequencer:_roll",
        change=without_seq,
    ),
    Mutation(
        name="the witness does not look at the order",
        target="interlace.comm.post_order:PostOrder.admit",
        change=forgets_the_last,
    ),
    Mutation(
        name="a process that has ended looks alive",
        target="interlace.comm.board:process_state",
        change=looks_alive,
    ),
    Mutation(
        name="all paths of a rank lend the same buffers",
        target="interlace.rollout.launch.processes:ProcessTransport._workspace",
        change=one_set_of_buffers,
    ),
)
