"""Aborted trajectories go on behind their own tokens, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.rollout.cutting import cut

from interlace.rollout import EndReason, Rollout, RolloutConfig, Task, Trajectory, load_config
from interlace.rollout.digest import digest
from interlace.rollout.store import TrajectoryWriter, read_trajectories
from interlace.rollout.trajectory_ids import TrajectoryIds

FORGETFUL = "environments_to_resume:Forgetful"
LAKE = Task("frozen_lake", seed=3, params={"random_map": True})
ANSWER = Task(prompt="tell me a story", max_tokens=24, answer=7)


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


def played(config: RolloutConfig, task: Task) -> Trajectory:
    with Rollout(config) as rollout:
        (whole,) = rollout.run([task])
    return whole


def resumed(config: RolloutConfig, *parts: Trajectory) -> list[Trajectory]:
    with Rollout(config) as rollout:
        return sorted(rollout.run(resume=parts), key=lambda t: t.trajectory_id)


def assert_nothing_happened(again: Trajectory, whole: Trajectory) -> None:
    """Equal but for the counts of what was computed and found in the cache."""
    turns = tuple(
        replace(turn, cached_tokens=other.cached_tokens, prefill_tokens=other.prefill_tokens)
        for turn, other in zip(again.turns, whole.turns, strict=True)
    )
    assert replace(again, turns=turns) == whole


def cut_each(wholes: Sequence[Trajectory], tasks: Sequence[Task]) -> list[Trajectory]:
    """Each cut at another kind of place, from nothing at all to all but one token."""
    parts = []
    for kind, (whole, task) in enumerate(zip(wholes, tasks, strict=True)):
        longest = max(whole.turns, key=lambda turn: turn.stop - turn.start)
        assert longest.stop - longest.start > 2, "a turn can be cut in two"
        places = (
            0,
            whole.turns[0].start,
            longest.start + 1,
            longest.start + 2,
            whole.turns[0].stop,  # of an episode: said, not done
            whole.turns[-1].start,
            whole.num_tokens - 1,
        )
        last = min(places[kind], whole.num_tokens - 1)
        parts.append(cut(whole, task, last))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "chunked", "multiplexed", "disaggregated"])
def test_what_is_resumed_is_as_if_it_had_not_been_interrupted_bit_for_bit(mode: str) -> None:
    config = tiny(f"mode={mode}", "sampling.stop_token_ids=[]", "sampling.temperature=1.3")
    tasks = [
        *(Task(prompt=f"tell me story {n}", max_tokens=24, task_id=str(n)) for n in range(7)),
        *(Task("frozen_lake", seed=n, params={"random_map": True}) for n in range(7)),
    ]
    with Rollout(config) as rollout:
        wholes = sorted(rollout.run(tasks), key=lambda t: t.trajectory_id)
    parts = cut_each(wholes[:7], tasks[:7]) + cut_each(wholes[7:], tasks[7:])
    assert sum(part.turns[-1].finish == "aborted" for part in parts if part.turns) > 7
    for again, whole in zip(resumed(config, *parts), wholes, strict=True):
        assert_nothing_happened(again, whole)


@pytest.mark.slow
def test_a_stop_string_may_lie_across_the_cut() -> None:
    free = played(tiny("sampling.stop_token_ids=[]"), ANSWER)
    text, turn = free.turns[0].text, free.turns[0]
    wanted = text[len(text) // 2 :][:3]
    config = tiny("sampling.stop_token_ids=[]", f"sampling.stop_strings=[{wanted!r}]")
    whole = played(config, ANSWER)
    assert (whole.turns[0].finish, wanted in whole.turns[0].text) == ("stop", True)
    for num in range(max(turn.start + 1, whole.num_tokens - 3), whole.num_tokens):
        (again,) = resumed(config, cut(whole, ANSWER, num))
        assert_nothing_happened(again, whole)


@pytest.mark.slow
def test_what_was_sampled_stays_as_it_was_recorded() -> None:
    config = tiny("sampling.stop_token_ids=[]")
    whole = played(config, ANSWER)
    num = whole.num_tokens - 5
    part = cut(whole, ANSWER, num)
    mask = part.loss_mask
    odd = replace(
        part,
        logprob=np.where(mask, np.float32(-7.0), part.logprob),
        logprob_raw=np.where(mask, np.float32(-8.0), part.logprob_raw),
        version=np.where(mask, 5, part.version).astype(np.int32),
        kv_version=np.where(mask, 4, part.kv_version).astype(np.int32),
        experts=(7 - part.experts).astype(np.uint8),
    )
    (again,) = resumed(config, odd)
    for name in ("token_ids", "source", "turn", "logprob", "logprob_raw", "version", "kv_version"):
        recorded, kept = getattr(odd, name), getattr(again, name)[:num]
        assert kept.tobytes() == recorded.tobytes(), name
    known = odd.experts_known
    assert again.experts[:known].tolist() == odd.experts[:known].tolist()
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    assert again.logprob[num:].tobytes() == whole.logprob[num:].tobytes()
    assert again.experts[known:].tolist() == whole.experts[known:].tolist()
    assert (again.version[num:] == 0).all()


@pytest.mark.slow
def test_a_pause_that_aborts_gives_partials_that_end_as_if_it_had_not_been() -> None:
    config = tiny("sampling.stop_token_ids=[]", "layout.world=1")
    tasks = [
        *(Task(prompt=f"story {n}", max_tokens=200 if n else 1, task_id=str(n)) for n in range(4)),
        *(Task("frozen_lake", seed=seed) for seed in range(4)),
    ]
    with Rollout(config) as rollout:
        reference = digest(list(rollout.run(tasks)))
    with Rollout(config) as rollout:
        run = rollout.run(tasks)
        stream = iter(run)
        got = [next(stream)]
        rollout.pause("abort")
        rollout.resume()
        got += list(stream)
        partials = run.partials
        finished = [t for t in got if t.end_reason is not EndReason.ABORTED]
        assert {t.trajectory_id for t in got} == set(range(8))
        assert [t.trajectory_id for t in partials] == sorted(
            {t.trajectory_id for t in got} - {t.trajectory_id for t in finished}
        )
        assert any(0 < t.sampled_tokens < 200 for t in partials)
        again = rollout.run(resume=partials)
        rollout.abort(partials[0].trajectory_id)
        finished += [t for t in again if t.end_reason is not EndReason.ABORTED]
        if again.partials:  # aborted twice, unless it had ended before
            finished += rollout.run(resume=again.partials)
    assert digest(finished) == reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"differs_at": 0}, "after seed 0 and the same 0 actions its observation differs"),
        ({"differs_at": 2}, "after seed 0 and the same 2 actions its observation differs"),
    ],
)
def test_an_environment_that_shows_something_else_ends_its_trajectory_with_all_its_tokens(
    params: dict[str, int], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    task = Task(FORGETFUL, params=params)
    whole = played(tiny(), task)
    part = cut(whole, task, whole.turns[-1].start)
    (again,) = resumed(tiny(), part)
    assert again.end_reason is EndReason.ENVIRONMENT_ERROR
    assert complaint in again.info["error"]
    assert "Forgetful is not reproducible" in again.info["error"]
    assert not again.reproducible
    assert again.token_ids.tolist() == part.token_ids.tolist()
    assert again.logprob.tobytes() == part.logprob.tobytes()


@pytest.mark.slow
def test_an_environment_that_ends_earlier_than_it_did_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    task = Task(FORGETFUL, params={"differs_at": 9})
    whole = played(tiny(), task)
    part = cut(whole, replace(task, params={"differs_at": 9, "ends_at": 2}), whole.num_tokens - 1)
    (again,) = resumed(tiny(), part)
    assert again.end_reason is EndReason.ENVIRONMENT_ERROR
    assert "the same 2 actions its episode is over, and it went on" in again.info["error"]


@pytest.mark.slow
def test_a_partial_survives_its_file(tmp_path: Path) -> None:
    config = tiny("sampling.max_tokens=2")
    whole = played(config, LAKE)
    with TrajectoryWriter(tmp_path / "partials.parquet") as writer:
        writer.append(cut(whole, LAKE, whole.turns[-1].start + 1))
    (again,) = resumed(config, *read_trajectories(tmp_path / "partials.parquet"))
    assert_nothing_happened(again, whole)


@pytest.mark.slow
def test_a_prompt_that_is_rendered_differently_is_not_resumed() -> None:
    whole = played(tiny(), ANSWER)
    part = replace(cut(whole, ANSWER, whole.num_tokens - 1), prompt="tell me another story")
    (again,) = resumed(tiny(), part)
    assert again.end_reason is EndReason.ENVIRONMENT_ERROR
    assert "has the tokenizer or the chat template changed?" in again.info["error"]


@pytest.mark.slow
def test_what_does_not_fit_a_smaller_context_says_so() -> None:
    config = tiny("sampling.stop_token_ids=[]")
    whole = played(config, ANSWER)
    part = cut(whole, ANSWER, whole.num_tokens - 1)
    (again,) = resumed(tiny(f"model.max_context={part.num_tokens}"), part)
    assert again.end_reason is EndReason.ENVIRONMENT_ERROR
    assert (
        f"the turn to resume, with its context, has {part.num_tokens} tokens"
        in (again.info["error"])
    )


@pytest.mark.slow
def test_each_partial_is_resumed_once_and_numbers_stay_apart() -> None:
    whole = played(tiny(), ANSWER)
    part = cut(whole, ANSWER, whole.num_tokens - 1)
    elsewhere = replace(part, trajectory_id=5)
    with Rollout(tiny()) as rollout:
        with pytest.raises(ValueError, match="trajectory 5 is given twice"):
            rollout.run(resume=[elsewhere, elsewhere])
        (again,) = rollout.run(resume=[elsewhere])
        assert again.trajectory_id == 5
        with pytest.raises(ValueError, match="trajectory 5 cannot be resumed: it is being played"):
            rollout.run(resume=[elsewhere])
        (new,) = rollout.run([ANSWER])
        assert new.trajectory_id == 6
        unknown = replace(part, trajectory_id=9, info={})
        with pytest.raises(ValueError, match="trajectory 9 was aborted, and its info has no"):
            rollout.run(resume=[unknown])


def test_numbers_are_claimed_once() -> None:
    ids = TrajectoryIds()
    assert list(ids.new(3)) == [0, 1, 2]
    ids.give_back(1)
    ids.claim([1, 7])
    assert list(ids.new(2)) == [8, 9]
    ids.claim([5])
    ids.claim([3, 4, 6])
    taken: Sequence[Sequence[int]] = [[1], [5], [6], [7], [9], [20, 20]]
    for numbers in taken:
        with pytest.raises(ValueError, match=f"trajectory {numbers[0]} "):
            ids.claim(numbers)
    assert list(ids.new(1)) == [10], "what was refused took no number"
