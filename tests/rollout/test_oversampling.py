"""More tasks than are wanted: everything ends in one place, and is counted there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from interlace.rollout import Rollout, RolloutConfig, RolloutError, Task, Trajectory, load_config
from interlace.rollout.digest import digest
from interlace.rollout.oversampling import (
    AcceptError,
    Dropped,
    DropReason,
    Rules,
    Selection,
    length_bias,
    staleness,
)
from interlace.rollout.run import Run
from interlace.rollout.trajectory import EndReason, Ledger, Source


def ended(
    number: int,
    *,
    group: str | None = None,
    versions: Sequence[int] = (0,),
    end_reason: EndReason = EndReason.TERMINATED,
) -> Trajectory:
    """A token of prompt, then one for each version."""
    num = len(versions)
    ledger = Ledger()
    ledger.append_given([1], Source.PROMPT, 0)
    ledger.append_sampled([2] * num, [-1.0] * num, [-1.0] * num, versions, versions, 0)
    return Trajectory.from_ledger(
        ledger,
        trajectory_id=number,
        task_id="task",
        group_id=group,
        env="prompt",
        seed=0,
        turns=(),
        end_reason=end_reason,
        info={},
    )


# ---- rules alone


def test_staleness_counts_from_the_oldest_token() -> None:
    assert staleness(ended(0, versions=(3, 4, 6)), 7) == 4
    assert staleness(ended(0, versions=()), 7) == 0


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="want must be at least 1, found 0"):
        Rules(want=0)
    with pytest.raises(ValueError, match="max_staleness must be 0 or more, found -1"):
        Rules(max_staleness=-1)


def test_length_bias_is_the_mean_given_out_over_the_mean_begun() -> None:
    dropped = Dropped(lengths={"aborted": (30, 50), "not_started": (0, 0, 0)})
    assert (dropped.num, dropped.by_reason) == (5, {"aborted": 2, "not_started": 3})
    assert length_bias([10, 30], dropped) == pytest.approx(20 / 30)
    assert length_bias([10, 30], Dropped(lengths={})) == 1
    assert length_bias([], dropped) is None


def test_a_group_is_judged_when_it_is_whole_in_the_order_of_its_ids() -> None:
    asked: list[list[int]] = []

    def accept(group: list[Trajectory]) -> bool:
        asked.append([member.trajectory_id for member in group])
        return len(asked) > 1

    async def scene() -> None:
        selection = Selection(
            Rules(accept=accept, want=2),
            group_sizes={"a": 2, "b": 2, "c": 2},
            by_group=True,
            version=lambda: 0,
        )
        assert selection.gather(ended(1, group="a")) == []
        whole = selection.gather(ended(0, group="a"))
        assert await selection.judge(whole) is DropReason.REJECTED
        assert not selection.enough
        selection.gather(ended(3, group="b"))
        assert await selection.judge(selection.gather(ended(2, group="b"))) is None
        assert selection.enough
        selection.gather(ended(4, group="c"))
        whole = selection.gather(ended(5, group="c"))
        assert selection.useless(whole) is DropReason.SURPLUS
        assert await selection.judge(whole) is DropReason.SURPLUS, "it was being judged already"

    asyncio.run(scene())
    assert asked == [[0, 1], [2, 3], [4, 5]]


def test_a_group_with_an_aborted_member_is_of_no_use_and_one_too_old_is_stale() -> None:
    async def scene() -> None:
        selection = Selection(
            Rules(max_staleness=1), group_sizes={"a": 2}, by_group=True, version=lambda: 5
        )
        part = ended(0, group="a", versions=(5,), end_reason=EndReason.ABORTED)
        assert selection.useless([part, ended(1, versions=(5,))]) is DropReason.UNFINISHED_GROUP
        fresh, stale = ended(2, versions=(4, 5)), ended(3, versions=(3, 5))
        assert await selection.judge([fresh]) is None
        assert await selection.judge([fresh, stale]) is DropReason.STALE
        selection.gather(part)
        assert selection.rest() == [part]
        assert selection.rest() == []

    asyncio.run(scene())


def test_what_became_too_old_while_it_waited_is_not_given_out() -> None:
    version, taken = [3], []
    run = Run(3, rules=Rules(max_staleness=1), version=lambda: version[0], taken=taken.append)
    run.put([ended(0, versions=(2,))])
    run.put([ended(1, versions=(4, 4)), ended(2, versions=(3,))])
    run.put([ended(3, versions=(4, 5))])
    run.end()
    stream = iter(run)
    assert next(stream).trajectory_id == 0
    version[0] = 5
    assert [t.trajectory_id for t in stream] == [3], "a group is given out whole or not at all"
    assert run.dropped.lengths == {"stale": (2, 1)}
    assert run.partials == []
    assert taken == [1, 2, 1]
    assert list(run) == [], "who asks again is answered"


# ---- in a rollout


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


@pytest.fixture(scope="module")
def reference() -> str:
    config = tiny()
    with Rollout(config) as rollout:
        return digest(list(rollout.run(config.expand_tasks())))


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 8])
def test_a_run_ends_when_enough_is_accepted_and_the_next_one_finishes_the_rest(
    places: int, reference: str
) -> None:
    config = tiny(f"environments.episodes_per_process={places}")
    with Rollout(config) as rollout:
        run = rollout.run(config.expand_tasks(), want=2)
        first = list(run)
        assert len(run) == 2
        assert [t.group_id for t in first] == [first[0].group_id] * 2
        assert first[0].trajectory_id + 1 == first[1].trajectory_id
        assert run.dropped.num == 6
        assert set(run.dropped.by_reason) <= {reason.value for reason in DropReason}
        everything = [t.trajectory_id for t in (*first, *run.partials)]
        assert sorted(everything) == list(range(8)), "each task ended in one place"
        lengths = sorted(n for each in run.dropped.lengths.values() for n in each)
        assert lengths == sorted(t.sampled_tokens for t in run.partials)
        rest = rollout.run(resume=run.partials)
        second = list(rest)
        assert rest.partials == []
        assert rest.dropped.num == 0
    assert digest(first + second) == reference


@pytest.mark.slow
def test_what_accept_rejects_is_counted_with_its_lengths_and_does_not_come_back() -> None:
    config = tiny()
    with Rollout(config) as rollout:
        run = rollout.run(config.expand_tasks(), accept=lambda group: group[0].trajectory_id > 2)
        accepted = list(run)
    assert sorted(t.trajectory_id for t in accepted) == [4, 5, 6, 7]
    assert run.dropped.by_reason == {"rejected": 4}
    assert all(length > 0 for length in run.dropped.lengths["rejected"])
    assert run.partials == []
    assert run.length_bias is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (lambda group: 1 // 0, "accept raised ZeroDivisionError"),
        (lambda group: None, "accept returned None: it must say True or False"),
    ],
)
def test_a_broken_accept_is_one_clear_error(
    accept: Callable[[list[Trajectory]], bool], message: str
) -> None:
    config = tiny()
    with Rollout(config) as rollout, pytest.raises(AcceptError, match=message):
        list(rollout.run(config.expand_tasks(), accept=accept))


@pytest.mark.slow
def test_fewer_are_given_out_where_not_enough_are_accepted() -> None:
    config = tiny()
    with Rollout(config) as rollout:
        tasks = config.expand_tasks()
        run = rollout.run(tasks, want=6, accept=lambda group: group[0].trajectory_id == 0)
        assert len(list(run)) == 2
        with pytest.raises(ValueError, match="want is 9, and there are 8 tasks"):
            rollout.run(tasks, want=9)


@pytest.mark.slow
def test_rewards_are_given_once_also_to_what_came_from_another_run() -> None:
    def one_more(trajectory: Trajectory) -> float:
        return trajectory.return_ + 100.0

    config = tiny()
    with Rollout(config, reward_fn=one_more) as rollout:
        run = rollout.run(config.expand_tasks(), want=2)
        given = [*run, *rollout.run(resume=run.partials)]
    assert len(given) == 8
    assert all(100 <= t.return_ <= 101 for t in given)


@pytest.mark.slow
def test_nobody_waits_for_a_slow_environment_when_there_is_enough() -> None:
    slow = {"prompt": [[1, 20]], "turns": [[2, 5, 3600.0, 0], [2, 5, 0.0, 0]]}
    tasks = [Task("scripted", params=slow), Task(prompt="quick", max_tokens=40)]
    began = time.monotonic()
    with Rollout(tiny()) as rollout:
        run = rollout.run(tasks, want=1)
        assert [t.task_id for t in run] == [tasks[1].task_id]
        (part,) = run.partials
    assert time.monotonic() - began < 30
    assert part.env == "scripted"
    assert part.end_reason is EndReason.ABORTED


@pytest.mark.slow
def test_a_caller_may_stop_a_run() -> None:
    tasks = [Task(prompt=f"story {n}", max_tokens=1 if n == 0 else 1500) for n in range(20)]
    with Rollout(tiny("sampling.stop_token_ids=[]", "scheduler.max_running=2")) as rollout:
        run = rollout.run(tasks)
        stream = iter(run)
        given = [next(stream)]
        run.stop()
        given += stream
        assert run.dropped.by_reason.keys() == {"not_started"}
        ids = {t.trajectory_id for t in given} | {t.trajectory_id for t in run.partials}
        assert ids == set(range(20))
        assert len(given) + run.dropped.num == 20


@pytest.mark.slow
def test_who_still_iterates_when_the_rollout_is_left_is_told() -> None:
    with Rollout(tiny("sampling.stop_token_ids=[]")) as rollout:
        run = rollout.run([Task(prompt="long", max_tokens=1500)])
    with pytest.raises(RolloutError, match="left before this run had ended"):
        list(run)


@pytest.mark.slow
def test_groups_may_be_given_out_whole_without_any_limit() -> None:
    config = tiny()
    with Rollout(config) as rollout:
        given = list(rollout.run(config.expand_tasks(), max_staleness=0))
    pairs = [(a.trajectory_id, b.trajectory_id) for a, b in zip(*[iter(given)] * 2, strict=True)]
    assert sorted(pairs) == [(0, 1), (2, 3), (4, 5), (6, 7)]
