"""What the answers to public complaints promise, where no other test sees it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading

import pytest
from tests.rollout.test_scheduler import request, run, scheduler

from interlace.envs.lifeline import die_with_parent
from interlace.rollout import Rollout, Task, load_config
from interlace.rollout.balancer import Balancer
from interlace.rollout.cache import model_folder
from interlace.rollout.chat import Chat
from interlace.rollout.messages import Abort, Command, TurnRequest, TurnResult
from interlace.rollout.rewards import Rewarder
from interlace.rollout.trajectory import EndReason, Ledger, Trajectory
from interlace.rollout.turns import Turns

PATIENCE_S = 5.0


def test_a_turn_that_nobody_waits_for_is_ended() -> None:
    async def scene() -> None:
        sent: list[tuple[int, Command]] = []
        turns = Turns(lambda leader, command: sent.append((leader, command)))
        waiting = asyncio.create_task(turns.generate(3, request(7, [1, 2, 3])))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert sent[1:] == [(3, Abort(trajectory=7))]

    asyncio.run(scene())


def test_nothing_is_found_of_a_prefill_that_was_abandoned() -> None:
    prompt = range(1, 12)
    ours = scheduler(chunk=64)
    ours.submit(request(0, prompt))
    ours.describe_prefill()
    ours.abort(0)
    ours.drop_prefill()
    ours.submit(request(1, prompt))
    first, second = run(ours)
    assert (first.trajectory, first.finish) == (0, "aborted")
    assert (second.cached_tokens, second.prefill_tokens) == (0, len(prompt))


def test_a_group_stays_together_until_its_place_is_too_full() -> None:
    balancer = Balancer(3, slack=2)
    assert [balancer.place("group") for _ in range(5)] == [0, 0, 0, 1, 2]
    assert [balancer.place(None) for _ in range(2)] == [1, 2]
    assert balancer.place("group") == 0


def ended_at_once(trajectory_id: int) -> Trajectory:
    return Trajectory.from_ledger(
        Ledger(),
        trajectory_id=trajectory_id,
        task_id="task",
        group_id=None,
        env="lake",
        seed=0,
        turns=(),
        end_reason=EndReason.TERMINATED,
        info={},
    )


def test_episodes_go_on_while_a_reward_function_takes_its_time() -> None:
    gone_on = threading.Event()
    waited: list[bool] = []

    def slow(trajectory: Trajectory) -> float:
        waited.append(gone_on.wait(PATIENCE_S))
        return 0.0

    async def others() -> None:
        gone_on.set()

    async def scene() -> None:
        rewarder = Rewarder(slow, "trajectory", {})
        await asyncio.gather(rewarder.reward(ended_at_once(0)), others())

    asyncio.run(scene())
    assert waited == [True], "the loop stood still until the function had returned"


@pytest.mark.slow
def test_sampled_tokens_come_back_as_they_were_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(model_folder("tiny-qwen3-moe"))
    known: dict[int, list[int]] = {}
    odd: list[list[int]] = []
    generate = Turns.generate

    async def watched(self: Turns, leader: int, request: TurnRequest, **more: object) -> TurnResult:
        before = known.get(request.trajectory, [])
        assert request.token_ids[: len(before)] == before, "not what was sampled"
        result = await generate(self, leader, request, **more)  # type: ignore[arg-type]
        known[request.trajectory] = [*request.token_ids, *result.token_ids]
        if chat.encode_choice(chat.decode(result.token_ids)) != result.token_ids:
            odd.append(result.token_ids)
        return result

    monkeypatch.setattr(Turns, "generate", watched)
    overrides = ["layout.world=1", "sampling.max_tokens=6", "environments.max_turns=3"]
    with Rollout(load_config(preset="tiny", overrides=overrides)) as rollout:
        (trajectory,) = rollout.run([Task("colossal_cave", seed=1)])
    assert trajectory.num_turns == 3
    assert known == {0: trajectory.token_ids.tolist()}
    assert odd, "every turn is the tokens of its text: this proves nothing"


@pytest.mark.processes
def test_a_process_ends_with_its_parent() -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        _parent_of_one(writing)
    os.close(writing)
    child = int(os.read(reading, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended, _, _ = select.select([reading], [], [], PATIENCE_S)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    assert ended, "it still holds its end of the pipe"


def _parent_of_one(writing: int) -> None:
    """Never returns: this is another process."""
    try:
        parent = os.getpid()
        if not os.fork():
            die_with_parent(parent, signal.SIGKILL)
            os.write(writing, str(os.getpid()).encode())
        signal.pause()
    finally:
        os._exit(1)
