"""Turns without ranks: what is sent, and whom an abort, a pause or a failure wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.messages import (
    Abort,
    Command,
    Held,
    Pause,
    RankFailure,
    Resume,
    TurnRequest,
    TurnResult,
)
from interlace.rollout.turns import Barrier, RolloutError, TurnAborted, Turns


def request(trajectory: int = 3) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=[5, 6],
        seed=0,
        experts_from=0,
        sampling=SamplingParams(),
    )


def result(trajectory: int = 3, finish: str = "stop") -> TurnResult:
    return TurnResult(
        trajectory=trajectory,
        turn=0,
        token_ids=[7],
        logprobs_raw=[-1.0],
        logprobs=[-1.0],
        versions=[0],
        kv_versions=[0],
        experts=b"",
        experts_shape=(0, 1, 1),
        finish=finish,
        cached_tokens=0,
        prefill_tokens=2,
    )


class Sent(list[tuple[int, Command]]):
    """What leaders were sent."""

    def put(self, leader: int, command: Command) -> None:
        self.append((leader, command))

    def of(self, kind: type[Command]) -> list[tuple[int, Any]]:
        return [(leader, command) for leader, command in self if isinstance(command, kind)]


def play(
    scene: Callable[[Turns, Sent], Coroutine[Any, Any, None]], *, barrier: Barrier | None = None
) -> None:
    sent = Sent()

    async def run() -> None:
        turns = Turns(sent.put, num_leaders=2, barrier=barrier)
        async with asyncio.timeout(5):
            await scene(turns, sent)

    asyncio.run(run())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def ends_as_aborted(task: asyncio.Task[Any]) -> None:
    with pytest.raises(TurnAborted):
        await task


def test_while_paused_no_turn_is_sent_and_afterwards_it_is() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        turns.pause("keep")
        turn = asyncio.create_task(turns.generate(1, request()))
        await settle()
        assert sent == [(0, Pause(mode="keep")), (1, Pause(mode="keep"))]
        turns.resume()
        await settle()
        assert sent.of(Resume) == [(0, Resume()), (1, Resume())]
        assert sent.of(TurnRequest) == [(1, request())]
        turns.deliver(result())
        assert (await turn).token_ids == [7]

    play(scene)


def test_a_pause_that_aborts_ends_who_is_between_turns_and_leaves_running_turns_to_the_ranks() -> (
    None
):
    async def scene(turns: Turns, sent: Sent) -> None:
        running = asyncio.create_task(turns.generate(0, request(1)))
        acting = asyncio.create_task(turns.unless_aborted(2, asyncio.sleep(60)))
        await settle()
        turns.pause("abort")
        await ends_as_aborted(acting)
        await ends_as_aborted(asyncio.create_task(turns.generate(0, request(4))))
        assert not running.done()
        turns.deliver(result(1, finish="aborted"))
        assert (await running).finish == "aborted"
        assert [number for number, _ in turns.asked] == [1]

    play(scene)


def test_who_waits_for_the_end_of_a_pause_can_be_aborted() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        turns.pause("keep")
        one = asyncio.create_task(turns.generate(0, request(1)))
        two = asyncio.create_task(turns.generate(0, request(2)))
        await settle()
        turns.abort(1)
        await ends_as_aborted(one)
        turns.pause("abort")
        await ends_as_aborted(two)
        assert not sent.of(TurnRequest)

    play(scene)


def test_an_abort_that_a_turn_outran_ends_the_trajectory_before_its_next() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        turn = asyncio.create_task(turns.generate(0, request()))
        await settle()
        turns.abort(3)
        assert sent.of(Abort) == [(0, Abort(trajectory=3))]
        turns.deliver(result(finish="stop"))
        await turn
        await ends_as_aborted(asyncio.create_task(turns.generate(0, request())))

    play(scene)


def test_who_is_resumed_is_not_ended_by_an_abort_of_before() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        turns.abort(3)
        turns.ended(3)
        turns.abort(3)
        turns.expect(3)
        turn = asyncio.create_task(turns.generate(0, request()))
        await settle()
        turns.deliver(result())
        assert (await turn).finish == "stop"

    play(scene)


def test_work_that_an_abort_interrupts_is_cancelled_and_what_is_done_counts() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        cancelled = []

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append("slow")
                raise

        async def quick() -> str:
            turns.abort(4)
            return "done"

        acting = asyncio.create_task(turns.unless_aborted(3, slow()))
        await settle()
        turns.abort(3)
        await ends_as_aborted(acting)
        assert cancelled == ["slow"]
        assert await turns.unless_aborted(4, quick()) == "done"

    play(scene)


def test_a_rank_that_fails_wakes_everybody_with_one_error() -> None:
    async def scene(turns: Turns, sent: Sent) -> None:
        waiting = [
            asyncio.create_task(turns.generate(0, request(1))),
            asyncio.create_task(turns.unless_aborted(2, asyncio.sleep(60))),
        ]
        await settle()
        turns.deliver(RankFailure(rank=1, error="ValueError: no", traceback=""))
        for task in waiting:
            with pytest.raises(RolloutError, match="rank 1: ValueError: no"):
                await task

    play(scene)


class Recorded:
    """A barrier with one hold at five tokens."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def holds(self, trajectory: int, num_sampled: int) -> list[tuple[int, int]]:
        return [(5 - num_sampled, 1)]

    def held(self, trajectory: int, version: int) -> None:
        self.told.append(("held", trajectory))

    def ended(self, trajectory: int) -> None:
        self.told.append(("ended", trajectory))


def test_requests_carry_their_holds_and_the_barrier_hears_who_came_to_them() -> None:
    barrier = Recorded()

    async def scene(turns: Turns, sent: Sent) -> None:
        turn = asyncio.create_task(turns.generate(0, request(), num_sampled=2))
        await settle()
        ((_, asked),) = sent.of(TurnRequest)
        assert asked.holds == [(3, 1)]
        turns.deliver(Held(trajectory=3, version=1))
        turns.deliver(result())
        await turn
        turns.ended(3)
        assert barrier.told == [("held", 3), ("ended", 3)]

    play(scene, barrier=barrier)
