"""A rank that fails ends the run, and nothing that was finished before is lost with it."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from interlace.rollout import EndReason, Rollout, RolloutConfig, RolloutError, Task, load_config
from interlace.rollout.digest import digest
from interlace.rollout.engine import Engine
from interlace.rollout.oversampling import Selection
from interlace.rollout.run import Run
from interlace.rollout.trajectory import Trajectory

pytestmark = pytest.mark.slow

TASKS = [
    *(Task("frozen_lake", seed=n, group_id=f"lake {n // 2}") for n in range(6)),
    *(Task(prompt=f"story {n}", max_tokens=12 + 20 * (n % 2), task_id=str(n)) for n in range(4)),
]


def tiny(*overrides: str) -> RolloutConfig:
    given = ("sampling.max_tokens=6", "environments.max_turns=6", "layout.world=2", *overrides)
    return load_config(preset="tiny", overrides=given)


class Failing(threading.Event):
    """Once it is set the second rank fails, after so many steps."""

    after = 0


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Failing:
    failing, step = Failing(), Engine.step

    async def changed(self: Engine) -> bool:
        if failing.is_set() and self.rank == 1:
            if not failing.after:
                raise ValueError("a shape that does not fit")
            failing.after -= 1
        return await step(self)

    monkeypatch.setattr(Engine, "step", changed)
    return failing


def given_before_it_failed(run: Run, given: list[Trajectory]) -> list[Trajectory]:
    """All that the run gives out, with what it has given before."""
    with pytest.raises(RolloutError, match="ValueError: a shape that does not fit"):
        given.extend(run)
    return given


def test_what_was_in_play_when_a_rank_failed_goes_on_elsewhere_to_the_same_bits(
    fail: Failing,
) -> None:
    config = tiny("environments.episodes_per_process=3", "environments.num_processes=1")
    with Rollout(config) as rollout:
        reference = digest(list(rollout.run(TASKS)))
    with Rollout(config) as rollout:
        run = rollout.run(TASKS)
        given = list(islice(run, 2))
        fail.after = 16  # episodes that began together end together: the next have a turn by then
        fail.set()
        given = given_before_it_failed(run, given)
    fail.clear()
    left = run.partials
    assert all(trajectory.end_reason is not EndReason.ABORTED for trajectory in given)
    assert all(trajectory.end_reason is EndReason.ABORTED for trajectory in left)
    assert sorted(t.trajectory_id for t in (*given, *left)) == list(range(len(TASKS)))
    assert any(trajectory.turns for trajectory in left), "nobody had got anywhere"
    with Rollout(config) as rollout:
        again = list(rollout.run(resume=left))
    assert digest([*given, *again]) == reference


def test_finished_members_of_a_group_wait_for_the_others_beyond_the_failure(
    fail: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, gather = set[int](), Selection.gather

    def watched(self: Selection, trajectory: Trajectory) -> list[Trajectory]:
        ended.add(trajectory.trajectory_id)
        if ended == {0, 1}:
            fail.set()
        return gather(self, trajectory)

    monkeypatch.setattr(Selection, "gather", watched)
    rewarded: list[list[int]] = []

    def reward(group: list[Trajectory]) -> list[float]:
        rewarded.append([member.trajectory_id for member in group])
        return [1.0] * len(group)

    config = tiny("rewards.per=group")
    tasks = [
        Task(prompt="a", max_tokens=2, group_id="first"),
        Task(prompt="a", max_tokens=2, group_id="other"),
        Task(prompt="b", max_tokens=120, group_id="other"),
    ]
    with Rollout(config, reward_fn=reward) as rollout:
        run = rollout.run(tasks)
        (first,) = given_before_it_failed(run, [])
    ended.clear()
    fail.clear()
    assert first.trajectory_id == 0
    assert [(t.trajectory_id, t.end_reason is EndReason.ABORTED) for t in run.partials] == [
        (1, False),
        (2, True),
    ]
    with Rollout(config, reward_fn=reward) as rollout:
        resumed = rollout.run(resume=run.partials)
        assert next(iter(resumed)).trajectory_id == 1
    assert rewarded == [[0], [1, 2]]


def test_one_that_was_submitted_raises_what_the_rank_failed_with(fail: Failing) -> None:
    with Rollout(tiny()) as rollout:
        future = rollout.submit(Task(prompt="a", max_tokens=900))
        fail.set()
        with pytest.raises(RolloutError, match="a shape that does not fit"):
            future.result(30)
