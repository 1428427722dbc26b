"""Mutations of updates: versions of weights, of keys and values, and the gap to a trainer."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.complaints.mutation import Function, Mutation

from interlace.rollout.messages import UpdateMode


def read_at_the_end(result: Function) -> Function:
    def changed(self: Any, finish: str) -> Any:
        made = result(self, finish)
        return msgspec.structs.replace(made, versions=made.versions[-1:] * len(made.versions))

    return changed


def finds_old(install: Function) -> Function:
    return lambda self, version, *, same: self.kv.install(version, same=same)


def as_new_as_tokens(number: Function) -> Function:
    return lambda self, stamp: self.version


def no_bound(oldest: Function) -> Function:
    return lambda self: 0


def aborts(updated: Function) -> Function:
    def changed(self: Any, version: int, mode: UpdateMode) -> Any:
        return updated(self, version, "abort" if mode == "same" else mode)

    return changed


def keeps_no_routing(forget: Function) -> Function:
    def changed(self: Any) -> int:
        num: int = forget(self)
        self.sampled_experts.clear()
        return num

    return changed


def unheard(refusals: Function) -> Function:
    return lambda self: []


def unlike(agreed: Function) -> Function:
    return lambda self, attempt, mine: mine


def for_ever(wait: Function) -> Function:
    def changed(self: Any, *args: Any) -> None:
        self._section = self._section.model_copy(update={"timeout_s": 1e6})
        wait(self, *args)

    return changed


def of_one_version(mismatch: Function) -> Function:
    return lambda *args, **kwargs: mismatch(*args, **kwargs)[:1]


def always_open(check: Function) -> Function:
    return lambda self, rows, weights_digest: 0.0


MUTATIONS = (
    Mutation(
        name="the version is read when an answer is complete",
        target="interlace.rollout.sequence:Sequence.result",
        change=read_at_the_end,
    ),
    Mutation(
        name="the prefix cache outlives an update",
        target="interlace.rollout.scheduler:Scheduler.install",
        change=finds_old,
    ),
    Mutation(
        name="keys and values count as new as the token",
        target="interlace.rollout.kv_versions:KVVersions.number",
        change=as_new_as_tokens,
    ),
    Mutation(
        name="keys and values may be of any age",
        target="interlace.rollout.kv_versions:KVVersions.oldest",
        change=no_bound,
    ),
    Mutation(
        name="a new number aborts what runs",
        target="interlace.rollout.scheduler:Scheduler.updated",
        change=aborts,
    ),
    Mutation(
        name="recorded experts are those computed last",
        target="interlace.rollout.sequence:Sequence.forget",
        change=keeps_no_routing,
    ),
    Mutation(
        name="a rank that refuses an update is not heard",
        target="interlace.rollout.weights_sync.attempt:Attempt.refusals",
        change=unheard,
    ),
    Mutation(
        name="digests of the weights are not compared",
        target="interlace.rollout.weights_sync.publisher:Publisher._agreed",
        change=unlike,
    ),
    Mutation(
        name="an update waits for ranks for ever",
        target="interlace.rollout.weights_sync.publisher:Publisher._await",
        change=for_ever,
    ),
    Mutation(
        name="the gap of one version is all that is told",
        target="interlace.rollout.mismatch:mismatch",
        change=of_one_version,
    ),
    Mutation(
        name="the gate lets every gap pass",
        target="interlace.rollout.drift_gate:DriftGate.check",
        change=always_open,
    ),
)
