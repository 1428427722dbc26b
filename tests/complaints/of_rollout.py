"""Mutations of scheduling, episodes, ledgers and results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec
from tests.complaints.mutation import Function, Mutation

from interlace.moe.random_model import RandomModelSizes, byte_tokenizer
from interlace.rollout.environment_room import EnvironmentFailure
from interlace.rollout.messages import RankFailure
from interlace.rollout.trajectory import EndReason, Trajectory


def deaf_to_failures(deliver: Function) -> Function:
    return lambda self, event: None if isinstance(event, RankFailure) else deliver(self, event)


def goes_on(generate: Function) -> Function:
    async def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.shield(generate(self, *args, **kwargs))

    return changed


def in_the_loop(call: Function) -> Function:
    async def changed(self: Any, argument: Any) -> Any:
        return self._function(argument)

    return changed


def _failed(item: Any) -> bool:
    return isinstance(item, Trajectory) and item.end_reason is EndReason.ENVIRONMENT_ERROR


def swallows(put: Function) -> Function:
    def changed(self: Any, item: Any) -> None:
        put(self, [one for one in item if not _failed(one)] if isinstance(item, list) else item)

    return changed


def ends_all(play: Function) -> Function:
    async def changed(self: Any, *args: Any, **kwargs: Any) -> Trajectory:
        trajectory: Trajectory = await play(self, *args, **kwargs)
        if _failed(trajectory):
            raise EnvironmentFailure(trajectory.info["failure"], trajectory.info["error"])
        return trajectory

    return changed


def ends_all_in_time(play: Function) -> Function:
    async def changed(self: Any, *args: Any, **kwargs: Any) -> Trajectory:
        trajectory: Trajectory = await play(self, *args, **kwargs)
        if _failed(trajectory) and trajectory.info["failure"] == "hung":
            raise EnvironmentFailure("hung", trajectory.info["error"])
        return trajectory

    return changed


def ends_well(interact: Function) -> Function:
    async def changed(self: Any, *args: Any, **kwargs: Any) -> EndReason:
        reason = await interact(self, *args, **kwargs)
        return EndReason.TERMINATED if reason is EndReason.MAX_TOKENS else reason

    return changed


def hashes(place: Function) -> Function:
    def changed(self: Any, group_id: str | None) -> int:
        if group_id is None:
            return place(self, None)
        leader = crc32(group_id.encode()) % len(self._load)
        self._load[leader] += 1
        return leader

    return changed


def counts_as_computed(drop_prefill: Function) -> Function:
    def changed(self: Any) -> None:
        for one in self._flights.get("prefill", ()):
            sequence, num = one.sequence, one.stop - one.start
            sequence.compute(one.start, sequence.experts[one.start : one.stop], [0] * num)
        drop_prefill(self)

    return changed


def frees_what_is_away(abort: Function) -> Function:
    def changed(self: Any, trajectory: int) -> None:
        abort(self, trajectory)
        sequence = self.away(trajectory)
        if sequence is not None and sequence.lease is not None:
            self.blocks.discard(sequence.lease)
            sequence.lease = None

    return changed


def loses_tokens(result: Function) -> Function:
    def changed(self: Any, finish: str) -> Any:
        made = result(self, finish)
        return msgspec.structs.replace(made, token_ids=[]) if finish == "aborted" else made

    return changed


def tokenises_again(token_ids: Function) -> Function:
    tokenizer = byte_tokenizer(RandomModelSizes().vocab_size)

    def changed(self: Any) -> Sequence[int]:
        text = tokenizer.decode(token_ids(self), skip_special_tokens=False)
        again: list[int] = tokenizer.encode(text).ids
        return again

    return changed


def shifted(loss_mask: Function) -> Function:
    def changed(self: Any) -> Any:
        mask = loss_mask(self).copy()
        mask[1:] = mask[:-1].copy()
        return mask

    return changed


def lost_with_its_rank(play: Function) -> Function:
    async def changed(self: Any, *args: Any, **kwargs: Any) -> Trajectory:
        trajectory: Trajectory = await play(self, *args, **kwargs)
        if self._turns.failure is not None:
            raise self._turns.failure
        return trajectory

    return changed


def begins_anew(play: Function) -> Function:
    return lambda self, number, task, past=None: play(self, number, task)


def plays_on(stop_in_time: Function) -> Function:
    async def changed(self: Any, playing: Any) -> None:
        await playing.stopping.wait()

    return changed


def by_rewards(solved: Function) -> Function:
    return lambda one: solved(replace(one, end_reason=EndReason.TERMINATED))


def unkept(leave: Function) -> Function:
    def changed(self: Any, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self._waiting.clear()
        leave(self, kind, error, trace)

    return changed


def alike(same: Function) -> Function:
    return lambda left, right: True


MUTATIONS = (
    Mutation(
        name="a rank's failure is not passed on",
        target="interlace.rollout.turns:Turns.deliver",
        change=deaf_to_failures,
    ),
    Mutation(
        name="a cancelled turn goes on",
        target="interlace.rollout.turns:Turns.generate",
        change=goes_on,
    ),
    Mutation(
        name="reward functions run in the collector's loop",
        target="interlace.rollout.rewards:Rewarder._call",
        change=in_the_loop,
    ),
    Mutation(
        name="failed episodes vanish",
        target="interlace.rollout.run:Run.put",
        change=swallows,
    ),
    Mutation(
        name="one failed episode ends the run",
        target="interlace.rollout.collector:Collector.play",
        change=ends_all,
    ),
    Mutation(
        name="one episode that takes too long ends the run",
        target="interlace.rollout.collector:Collector.play",
        change=ends_all_in_time,
    ),
    Mutation(
        name="what is resumed begins anew",
        target="interlace.rollout.collector:Collector.play",
        change=begins_anew,
    ),
    Mutation(
        name="what was in play is lost with the rank that failed",
        target="interlace.rollout.collector:Collector.play",
        change=lost_with_its_rank,
    ),
    Mutation(
        name="who is in play when there is enough plays on",
        target="interlace.rollout.player:Player._stop_in_time",
        change=plays_on,
    ),
    Mutation(
        name="a full context looks like an end",
        target="interlace.rollout.collector:Collector._interact",
        change=ends_well,
    ),
    Mutation(
        name="a hash decides where a group lives",
        target="interlace.rollout.balancer:Balancer.place",
        change=hashes,
    ),
    Mutation(
        name="an abandoned prefill counts as computed",
        target="interlace.rollout.scheduler:Scheduler.drop_prefill",
        change=counts_as_computed,
    ),
    Mutation(
        name="an abort frees blocks that others still write",
        target="interlace.rollout.scheduler:Scheduler.abort",
        change=frees_what_is_away,
    ),
    Mutation(
        name="an aborted turn loses its tokens",
        target="interlace.rollout.sequence:Sequence.result",
        change=loses_tokens,
    ),
    Mutation(
        name="history is tokenised again",
        target="interlace.rollout.trajectory:Ledger.token_ids",
        change=tokenises_again,
    ),
    Mutation(
        name="the loss mask is off by one",
        target="interlace.rollout.trajectory:Trajectory.loss_mask",
        change=shifted,
    ),
    Mutation(
        name="failed episodes count by their rewards",
        target="interlace.rollout.evaluation:_solved",
        change=by_rewards,
    ),
    Mutation(
        name="an error takes what was collected with it",
        target="interlace.rollout.store:TrajectoryWriter.__exit__",
        change=unkept,
    ),
    Mutation(
        name="the self-test compares nothing",
        target="interlace.moe.selftest:_same",
        change=alike,
    ),
)
