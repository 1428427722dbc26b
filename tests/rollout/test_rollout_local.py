"""The whole rollout in one process: tiny model, real environments, every rank in a LocalWorld."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from interlace.moe.model import ForwardOutput
from interlace.rollout import EndReason, Rollout, RolloutConfig, Source, Task, load_config
from interlace.rollout.digest import digest
from interlace.rollout.figures import Figures, figures
from interlace.rollout.group import Leader
from interlace.rollout.launch.local import LocalTransport
from interlace.rollout.rewards import RewardError
from interlace.rollout.trajectory import Trajectory

pytestmark = pytest.mark.slow


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


def played(*overrides: str) -> tuple[list[Trajectory], Figures]:
    config = tiny(*overrides)
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    return trajectories, figures(rollout.records)


@pytest.fixture(scope="module")
def reference() -> str:
    trajectories, _ = played("mode=serial", "layout.world=1")
    return digest(trajectories)


MODES = ("serial", "chunked", "whole_forward", "multiplexed")
WAYS = list(itertools.product(MODES, (1, 2), (7, 64)))


@pytest.mark.parametrize(("mode", "world", "chunk"), WAYS)
def test_one_digest_whatever_the_way(mode: str, world: int, chunk: int, reference: str) -> None:
    serial_device = chunk % 2 * 2
    trajectories, measured = played(
        f"mode={mode}",
        f"layout.world={world}",
        f"scheduler.chunk_tokens={chunk}",
        f"arrival_seed={chunk}",
        f"launch.interleaving_seed={world + chunk}",
        f"launch.serial_device_slots={serial_device}",
    )
    assert digest(trajectories) == reference
    assert (measured.coexisting_steps_share > 0.3) == (mode in ("whole_forward", "multiplexed"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_the_same_digest_with_heads_split_over_ranks(
    mode: str, world: int, tp: int, reference: str
) -> None:
    trajectories, measured = played(
        f"mode={mode}",
        f"layout.world={world}",
        f"layout.tp={tp}",
        f"launch.interleaving_seed={world + tp}",
        "launch.serial_device_slots=1",
    )
    assert digest(trajectories) == reference
    assert set(measured.idle_share) == set(range(world))


ORDERS = [
    ("plan", 1),
    ("plan", 2),
    ("turnstile", 0),
    ("turnstile", 1),
    ("global_enqueue", 0),
    ("abreast", 0),
]


@pytest.mark.parametrize(("policy", "layers"), ORDERS)
def test_the_same_digest_in_every_order_of_a_step(policy: str, layers: int, reference: str) -> None:
    trajectories, measured = played(
        f"order.policy={policy}",
        f"order.layers_per_boundary={layers}",
        "scheduler.chunk_tokens=16",
        "launch.serial_device_slots=1",
    )
    assert digest(trajectories) == reference
    assert measured.coexisting_steps_share > 0.3
    if policy not in ("plan", "abreast"):
        assert measured.alternations_per_step <= 1


def test_the_same_digest_where_every_collective_is_compared_first(reference: str) -> None:
    trajectories, _ = played(
        "launch.check_each_op=true", "layout.world=4", "layout.tp=2", "launch.interleaving_seed=3"
    )
    assert digest(trajectories) == reference


def test_outputs_are_taken_on_the_stream_they_were_computed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside: list[str] = []
    seen: list[tuple[str, tuple[str, ...]]] = []
    real_around, real_complete = LocalTransport.around, Leader.complete

    @contextmanager
    def around(self: LocalTransport, path: str) -> Iterator[None]:
        with real_around(self, path):
            inside.append(path)
            try:
                yield
            finally:
                inside.pop()

    def complete(self: Leader, path: str, output: ForwardOutput, version: int) -> None:
        seen.append((path, tuple(inside)))
        real_complete(self, path, output, version)

    monkeypatch.setattr(LocalTransport, "around", around)
    monkeypatch.setattr(Leader, "complete", complete)
    played("layout.world=1")
    assert {path for path, _ in seen} == {"decode", "prefill"}
    assert all(within == (path,) for path, within in seen)


def test_a_job_four_times_the_pool_finishes_with_the_same_digest() -> None:
    prompts = [f"prompt number {n}, which is a little longer" for n in range(12)]

    def answered(*overrides: str) -> tuple[str, Figures]:
        with Rollout(tiny("sampling.max_tokens=150", "layout.world=1", *overrides)) as rollout:
            answers = rollout.generate(prompts)
        assert sum(answer.num_tokens for answer in answers) > 4 * 5 * 64
        return digest(answers), figures(rollout.records)

    roomy, none = answered()
    scarce, some = answered("scheduler.num_blocks=5")
    assert (none.preemptions, some.preemptions > 0) == (0, True)
    assert roomy == scarce


def test_four_ranks_and_the_other_architecture_agree_with_themselves() -> None:
    one, _ = played("model.path=tiny-mixtral", "layout.world=1", "mode=serial")
    four, _ = played("model.path=tiny-mixtral", "layout.world=4")
    assert digest(one) == digest(four)


def test_bfloat16_is_exact_too() -> None:
    one, _ = played("model.dtype=bfloat16", "layout.world=1", "mode=serial")
    two, _ = played("model.dtype=bfloat16", "scheduler.chunk_tokens=13")
    assert digest(one) == digest(two)


def test_another_seed_is_another_digest(reference: str) -> None:
    trajectories, _ = played("seed=1")
    assert digest(trajectories) != reference


def test_decode_waits_much_shorter_than_in_serial() -> None:
    _, serial = played("mode=serial")
    _, multiplexed = played("mode=multiplexed", "scheduler.chunk_steps=3")
    # the tiny program has 12 boundaries, chunk_steps 3: at most 4 between two decode tickets
    assert multiplexed.decode_gap_max <= 4
    assert serial.decode_gap_max >= 3 * multiplexed.decode_gap_max
    assert serial.coexisting_steps_share == 0
    assert multiplexed.prefills_spanning_steps > 0


def test_the_ledger_says_where_every_token_comes_from() -> None:
    trajectories, _ = played()
    for trajectory in trajectories:
        sampled = trajectory.source == Source.SAMPLED
        assert (np.isnan(trajectory.logprob) == ~sampled).all()
        assert (trajectory.version[sampled] == 0).all()
        assert trajectory.experts_known == trajectory.num_tokens - 1
        assert Source.TEMPLATE in trajectory.source
        assert (Source.OBSERVATION in trajectory.source) == (trajectory.num_turns > 1)
        for turn, text in ((turn, turn.text) for turn in trajectory.turns):
            assert text in ("left", "down", "right", "up"), "choices keep actions valid"
            assert turn.valid_action is True


def test_a_masked_token_is_likelier_than_the_model_says() -> None:
    trajectories, _ = played()
    for trajectory in trajectories:
        sampled = trajectory.source == Source.SAMPLED
        assert (trajectory.logprob[sampled] >= trajectory.logprob_raw[sampled] - 1e-6).all()


def test_prompts_are_answered_in_the_order_given() -> None:
    with Rollout(tiny("sampling.max_tokens=5")) as rollout:
        answers = rollout.generate(["one", [{"role": "user", "content": "two"}], [5, 6, 7]])
    assert [answer.trajectory_id for answer in answers] == [0, 1, 2]
    assert answers[2].token_ids[:3].tolist() == [5, 6, 7]
    assert all(1 <= answer.sampled_tokens <= 5 for answer in answers)
    assert {answer.end_reason for answer in answers} <= {
        EndReason.MAX_TOKENS,
        EndReason.TERMINATED,
    }


def test_a_prompt_is_answered_alike_alone_and_among_others() -> None:
    prompts = [f"number {n}" for n in range(6)]
    with Rollout(tiny("sampling.max_tokens=6", "layout.world=1")) as rollout:
        together = rollout.generate(prompts)
    alone = []
    with Rollout(tiny("sampling.max_tokens=6")) as rollout:
        alone = [rollout.generate([prompt])[0] for prompt in prompts]
    assert digest(together) == digest(alone)


def test_greedy_ignores_the_seed() -> None:
    texts = []
    for seed in (1, 2):
        with Rollout(tiny("sampling.temperature=0", f"seed={seed}")) as rollout:
            texts.append([a.token_ids.tolist() for a in rollout.generate(["a", "b"])])
    assert texts[0] == texts[1]


def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it() -> None:
    with Rollout(tiny("sampling.max_tokens=40")) as rollout:
        (free,) = rollout.generate(["tell me"])
    text = free.turns[0].text
    wanted = text[len(text) // 2 :][:2]
    with Rollout(tiny("sampling.max_tokens=40", f"sampling.stop_strings=[{wanted!r}]")) as rollout:
        (stopped,) = rollout.generate(["tell me"])
    assert wanted in stopped.turns[0].text
    assert stopped.turns[0].finish == "stop"
    assert stopped.sampled_tokens <= free.sampled_tokens
    assert stopped.token_ids.tolist() == free.token_ids[: stopped.num_tokens].tolist()


def test_a_submitted_task_is_a_future_and_can_be_cancelled() -> None:
    with Rollout(tiny("sampling.max_tokens=200")) as rollout:
        done = rollout.submit(Task("frozen_lake", seed=3))
        dropped = rollout.submit(Task(prompt="forget it"))
        assert dropped.cancel()
        assert done.result(timeout=30).env == "frozen_lake"


def test_an_aborted_trajectory_keeps_its_tokens_and_stays_out_of_the_digest() -> None:
    with Rollout(tiny("sampling.max_tokens=1500", "sampling.stop_token_ids=[]")) as rollout:
        run = iter(
            rollout.run([Task(prompt="long", max_tokens=1500), Task(prompt="b", max_tokens=1)])
        )
        first = next(run)
        rollout.abort(0)
        aborted = next(run)
    assert first.trajectory_id == 1
    assert aborted.end_reason is EndReason.ABORTED
    assert 0 < aborted.sampled_tokens < 1500
    assert digest([first]) == digest([first, aborted])


def test_async_callers_get_the_same(reference: str) -> None:
    config = tiny()

    async def collect() -> list[Trajectory]:
        async with Rollout(config) as rollout:
            return [trajectory async for trajectory in rollout.run(config.expand_tasks())]

    assert digest(asyncio.run(collect())) == reference


def rewarded(function: str, per: str = "trajectory") -> Sequence[Trajectory]:
    path = f"rewards_for_tests:{function}"
    config = tiny(f'rewards.reward_fn="{path}"', f'rewards.per="{per}"')
    with Rollout(config) as rollout:
        return sorted(rollout.run(config.expand_tasks()), key=lambda t: t.trajectory_id)


@pytest.fixture
def rewards_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.usefixtures("rewards_on_path")
def test_a_reward_function_replaces_the_environments_rewards() -> None:
    for trajectory in rewarded("length"):
        assert trajectory.return_ == trajectory.sampled_tokens
    assert all(t.return_ == 0.0 for t in rewarded("on_which_thread"))


@pytest.mark.usefixtures("rewards_on_path")
def test_a_reward_function_may_see_a_whole_group() -> None:
    trajectories = rewarded("rank_in_group", per="group")
    for _, members in itertools.groupby(trajectories, key=lambda t: t.group_id):
        assert sorted(t.return_ for t in members) == [0.0, 1.0]


@pytest.mark.usefixtures("rewards_on_path")
@pytest.mark.parametrize(
    ("function", "message"),
    [("raises", "no reward today"), ("says_nothing", "None is no reward"), ("absent", "absent")],
)
def test_a_broken_reward_function_is_one_clear_error(function: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        rewarded(function)


def test_results_wait_for_a_slow_reader() -> None:
    config = tiny("results_queue=1", "environments.episodes_per_process=1")
    with Rollout(config) as rollout:
        run = iter(rollout.run(config.expand_tasks()))
        first = next(run)
        rest = list(run)
    assert len({first.trajectory_id, *(t.trajectory_id for t in rest)}) == 8


def test_leaving_in_the_middle_leaves_nothing_behind() -> None:
    config = tiny()
    with Rollout(config) as rollout:
        next(iter(rollout.run(config.expand_tasks())))
    assert set(rollout.records) == {0, 1}


def test_a_prompt_longer_than_the_context_is_recorded_and_the_others_go_on() -> None:
    with Rollout(tiny("model.max_context=40", "sampling.max_tokens=3")) as rollout:
        long, short = rollout.generate([list(range(3, 60)), [5, 6]])
    assert long.end_reason is EndReason.ENVIRONMENT_ERROR
    assert "57 tokens; the context holds 40" in long.info["error"]
    assert short.sampled_tokens > 0


def test_a_conversation_that_fills_the_context_ends_with_max_tokens() -> None:
    config = tiny("model.max_context=330", "environments.max_turns=100")
    tasks = [Task("colossal_cave", seed=1, max_tokens=4)]
    with Rollout(config) as rollout:
        (trajectory,) = rollout.run(tasks)
    assert trajectory.end_reason is EndReason.MAX_TOKENS
    assert trajectory.num_tokens <= 330


def test_a_stop_token_outside_the_vocabulary_is_refused_at_the_start() -> None:
    config = tiny("sampling.stop_token_ids=[99999]")
    with pytest.raises(ValueError, match="stop_token_ids has token id 99999"), Rollout(config):
        pass
