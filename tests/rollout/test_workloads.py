"""Workloads: what is drawn, what the files say, and that every mode does the same work."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from interlace.envs.scripted import prompt_text
from interlace.rollout import Rollout, load_config
from interlace.rollout.cache import BENCH_MODEL, build_model, model_folder
from interlace.rollout.chat import Chat
from interlace.rollout.config import ConfigError
from interlace.rollout.digest import digest
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import EndReason, Trajectory
from interlace.rollout.workloads import (
    Scale,
    Workload,
    describe,
    load_workload,
    workload_names,
)
from interlace.rollout.workloads.draws import Draws, Purpose, correlated
from interlace.rollout.workloads.recordings import mooncake, table, table_lines, taubench, tracelab
from interlace.rollout.workloads.spread import Spread

NAMES = (
    *("code-tool", "game-short", "math-tail", "mix-fault", "mooncake-conversation"),
    *("search-deep", "swe-long", "taubench", "tracelab"),
)


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    cache_folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLACE_CACHE", str(cache_folder))
        build_model("tiny-qwen3-moe", cache_folder / "models" / "tiny-qwen3-moe")
        yield


# ---- distributions


def quantiles(spread: Spread, num: int = 20_000) -> list[float]:
    values = [spread.quantile(u) for u in Draws(7, 0, 0, 1).uniforms(Purpose.LATENCY, num)]
    return list(np.quantile(values, [0.5, 0.9, 0.99]))


def test_draws_hit_the_quantiles_they_are_given() -> None:
    assert quantiles(Spread(p50=0.3, p90=13, p99=200)) == pytest.approx([0.3, 13, 200], rel=0.1)
    p50, p90, p99 = quantiles(Spread(p50=600, p99=8000))
    assert [p50, p99] == pytest.approx([600, 8000], rel=0.06)
    assert p90 == pytest.approx(600 * (8000 / 600) ** (1.2816 / 2.3263), rel=0.05)
    assert quantiles(Spread(low=10, high=50)) == pytest.approx([30, 46, 49.6], rel=0.02)
    assert quantiles(Spread(mean=10, sigma=5)) == pytest.approx([10, 16.4, 21.6], rel=0.02)
    assert quantiles(Spread(value=3)) == [3, 3, 3]


def test_rare_values_caps_and_floors_hold() -> None:
    spread = Spread(low=5, high=60, rare_share=0.02, rare_value=300)
    values = [spread.quantile(u) for u in Draws(1, 0, 0, 1).uniforms(Purpose.RESET, 20_000)]
    assert statistics.fmean(v == 300 for v in values) == pytest.approx(0.02, rel=0.15)
    assert max(v for v in values if v != 300) <= 60
    bounded = Spread(p50=10, p90=100, cap=50, min=8)
    assert (bounded.quantile(0.99), bounded.quantile(0.01)) == (50, 8)
    assert Spread(mean=0, sigma=10).quantile(0.1) == 0


def test_draws_are_the_same_numbers_on_every_machine() -> None:
    assert Draws(1, 2, 3, 4).integer(Purpose.TEXT) == 2907367231103194
    assert Draws(1, 2, 3, 4).uniforms(Purpose.TURNS, 2) == [0.5396649776044832, 0.4568438393405171]
    assert Spread(p50=600, p99=8000).quantile(0.9) == pytest.approx(2499.5614122276174)


def test_members_of_a_group_resemble_each_other_as_much_as_they_are_told_to() -> None:
    def score(group: int, member: int) -> float:
        shared = Draws(3, 0, group, 0).uniforms(Purpose.GENERATE, 1)[0]
        own = Draws(3, 0, group, member).uniforms(Purpose.GENERATE, 1)[0]
        return statistics.NormalDist().inv_cdf(correlated(shared, own, 0.6))

    pairs = [(score(group, 1), score(group, 2)) for group in range(3000)]
    assert statistics.correlation(*zip(*pairs, strict=True)) == pytest.approx(0.6, abs=0.04)
    assert statistics.stdev(first for first, _ in pairs) == pytest.approx(1, rel=0.04)


# ---- the workloads that come with the package


@cache
def described(name: str, scale: str) -> Mapping[str, Mapping[str, float]]:
    numbers: Mapping[str, Mapping[str, float]] = describe(load_workload(name, scale=scale))
    return numbers


def test_the_workloads_are_those_of_the_table() -> None:
    assert workload_names() == sorted(NAMES)


def test_swe_long_is_what_its_name_stands_for() -> None:
    full = described("swe-long", "full")
    assert (full["trajectories"], full["groups"]) == (512, 64)
    assert full["append"]["p50"] == pytest.approx(600, rel=0.05)
    assert full["append"]["p99"] == pytest.approx(8000, rel=0.1)
    assert full["generate"]["p50"] == pytest.approx(150, rel=0.05)
    assert full["generate"]["p99"] == pytest.approx(1500, rel=0.1)
    assert full["step_s"]["p90"] == pytest.approx(13, rel=0.1)
    assert full["context"]["max"] == 65536


def test_math_tail_has_nothing_to_prefill_and_a_tail() -> None:
    full = described("math-tail", "full")
    assert full["generate"]["mean"] == pytest.approx(22_000, rel=0.03)
    assert full["generate"]["max"] == 65_000
    assert full["prefill_share"] < 0.01  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_a_minute_keeps_the_ratio_of_prefill_to_decode(name: str) -> None:
    full, minute = described(name, "full"), described(name, "minute")
    assert minute["prefill_share"] == pytest.approx(full["prefill_share"], abs=0.1)
    for key in ("append", "generate"):
        if full[key]:
            shape = full[key]["p90"] / full[key]["p50"]
            assert minute[key]["p90"] / minute[key]["p50"] == pytest.approx(shape, rel=0.25)


@pytest.mark.parametrize("name", NAMES)
def test_a_minute_fits_its_model_and_its_job(name: str) -> None:
    workload = load_workload(name)
    config = load_config(overrides=[*workload.overrides, "mode=serial"])
    assert config.model.path == BENCH_MODEL
    places = config.environments.num_processes * config.environments.episodes_per_process
    assert places >= len(workload.tasks)
    assert max(one.num_context for one in workload.episodes) <= 2048


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path: Path) -> None:
    def tasks(file: Path) -> str:
        return json.dumps([[t.seed, t.params, t.group_id] for t in load_workload(file).tasks])

    same = written(tmp_path / "same.toml", SMALL)
    assert tasks(same) == tasks(same)
    assert tasks(written(tmp_path / "same.toml", f"seed = 5\n{SMALL}")) != tasks(
        written(tmp_path / "same.toml", f"seed = 6\n{SMALL}")
    )


def test_members_of_a_group_share_a_prompt_and_nothing_else() -> None:
    swe = load_workload("swe-long")
    first, second, *_ = swe.tasks
    assert first.group_id == second.group_id
    assert first.params["prompt"] == second.params["prompt"]
    assert first.params["turns"] != second.params["turns"]
    assert len({task.seed for task in swe.tasks}) == len(swe.tasks)


def test_parts_are_spread_over_the_batch() -> None:
    parts = [one.part for one in load_workload("mix-fault").episodes]
    assert {"swe", "code"} == set(parts[:20]) == set(parts[-30:])


def test_faults_cost_a_penalty_and_the_attempt_again(tmp_path: Path) -> None:
    text = SMALL.replace("append = 30", "append = 30\nlatency_s = 2")
    text = text.replace("num_prompts = 2", "num_prompts = 200")
    text += "faults = { rate = 0.2, penalty_s = 100, max_retries = 2 }\n"
    faulty = load_workload(written(tmp_path / "faulty.toml", text), scale="full")
    turns = [turn for one in faulty.episodes for turn in one.turns]
    shares = [statistics.fmean(turn.retries == num for turn in turns) for num in range(4)]
    assert shares == pytest.approx([0.8, 0.16, 0.04, 0], abs=0.02)
    assert {(turn.retries, turn.wait_s) for turn in turns} == {(0, 2), (1, 104), (2, 206)}
    none = load_workload(written(tmp_path / "none.toml", SMALL), scale="full")
    assert {turn.retries for one in none.episodes for turn in one.turns} == {0}


def test_an_episode_ends_where_its_context_is_full(tmp_path: Path) -> None:
    text = SMALL + "max_context = 130\n"
    for one in load_workload(written(tmp_path / "short.toml", text), scale="full").episodes:
        assert one.cut
        assert one.num_context <= 130
        assert one.turns[-1].append == 0


# ---- runs


def played(overrides: tuple[str, ...], tasks: tuple[Task, ...], *more: str) -> list[Trajectory]:
    config = load_config(overrides=[*overrides, "launch.kind=local", *more])
    with Rollout(config) as rollout:
        return sorted(rollout.run(tasks), key=lambda t: t.trajectory_id)


def a_few_of(name: str) -> Workload:
    """Two prompts, two members, a few turns of a few tokens."""
    full = described(name, "full")
    few = Scale(
        prompts=2 / full["groups"],  # type: ignore[operator]
        members=0.25 if name != "code-tool" else 0.125,
        turns=min(1.0, 4 / full["turns_per_trajectory"]["mean"]),
        lengths=16 / full["generate"]["p99"],
    )
    return load_workload(name, scale=few, sleep=False, model="tiny-qwen3-moe")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_every_mode_does_the_prescribed_work_of_every_workload_and_gives_one_digest() -> None:
    workloads = [a_few_of(name) for name in NAMES]
    tasks = tuple(task for workload in workloads for task in workload.tasks)
    planned = [one for workload in workloads for one in workload.episodes]
    assert all(one.num_context < 2048 for one in planned)
    overrides = (
        *("model.path=tiny-qwen3-moe", "layout.world=2", "scheduler.max_running=64"),
        *("environments.num_processes=1", f"environments.episodes_per_process={len(tasks)}"),
    )
    serial = played(overrides, tasks, "mode=serial")
    assert digest(serial) == digest(played(overrides, tasks, "mode=multiplexed"))
    for one, plan in zip(serial, planned, strict=True):
        assert one.end_reason is EndReason.TERMINATED
        assert [turn.stop - turn.start for turn in one.turns] == [t.generate for t in plan.turns]
        assert {turn.finish for turn in one.turns} == {"length"}
        # A turn that happens to end in an end-of-turn token needs no other.
        assert plan.num_context - len(one.turns) <= one.num_tokens <= plan.num_context


@pytest.mark.slow
@pytest.mark.processes
def test_a_turn_that_does_not_fit_the_context_is_refused_and_not_shortened() -> None:
    params = {"prompt": [[1, 100]], "turns": [[4, 30, 0.0, 0], [2000, 1, 0.0, 0]]}
    overrides = ("model.path=tiny-qwen3-moe", "environments.num_processes=1")
    (one,) = played(overrides, (Task("scripted", params=params),))
    assert one.end_reason is EndReason.ENVIRONMENT_ERROR
    assert "a turn of 2000 tokens is prescribed behind" in one.info["error"]
    assert "raise model.max_context or scheduler.num_blocks" in one.info["error"]


# ---- recordings

MOONCAKE = [
    {"timestamp": 5000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 5250, "input_length": 1536, "output_length": 9, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 600, "output_length": 0, "hash_ids": [4, 5]},
]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_mooncake_blocks_that_are_shared_stay_shared(tmp_path: Path) -> None:
    first, second, third = mooncake(lines(tmp_path / "trace.jsonl", MOONCAKE))
    assert [one.arrival_s for one in (first, second, third)] == [0, 0.25, 1.0]
    assert first.prompt[:2] == second.prompt[:2] == ((0, 512), (1, 512))
    assert [num for _, num in first.prompt] == [512, 512, 76]
    assert [num for _, num in third.prompt] == [600]
    assert first.prompt[2][0] != second.prompt[2][0]
    assert [one.turns for one in (first, third)] == [((7, 0, 0.0),), ((1, 0, 0.0),)]


def test_shared_beginnings_are_the_same_text_at_every_scale(tmp_path: Path) -> None:
    lines(tmp_path / "trace.jsonl", MOONCAKE)
    replay = '[replay]\nformat = "mooncake"\nfile = "trace.jsonl"\n'
    file = written(tmp_path / "replay.toml", f'summary = "x"\n{replay}[job.model]\n{TINY}')
    for lengths in (1.0, 0.37, 0.0625):
        workload = load_workload(file, scale=Scale(lengths=lengths))
        texts = [prompt_text(task.params["prompt"]) for task in workload.tasks]
        shared = round(1024 * lengths) - 20
        assert texts[0][:shared] == texts[1][:shared]
        assert texts[0] != texts[1]
        assert texts[0][:10] != texts[2][:10]
        numbers = describe(workload)
        whole = sum(one.num_prompt for one in workload.episodes)
        assert numbers["prompt_tokens"] == whole - round(1024 * lengths)


def test_tracelab_tables_and_traces_give_sessions(tmp_path: Path) -> None:
    columns = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"
    rows = "7,100,0,50,200,20,300\n8,150,0,50,90,5,0\n7,100,1,270,40,30,0\n"
    one, two = tracelab(written(tmp_path / "sessions.csv", f"{columns}\n{rows}"))
    assert one.prompt == ((0, 50), (1, 200))
    assert one.turns == ((20, 40, 0.3), (30, 0, 0.0))
    assert (two.prompt, two.arrival_s) == (((0, 50), (2, 90)), 0.05)
    tool = {"emitted_at": "2026-06-01T05:40:30.836Z", "result_at": "2026-06-01T05:40:31.696Z"}
    late = {"emitted_at": "2026-06-01T05:40:31.000Z", "result_at": "2026-06-01T05:40:32.836Z"}
    common = {"session_id": "a", "prefix_tokens": 10, "newly_append_tokens": 5, "output_tokens": 3}
    path = lines(tmp_path / "rounds.jsonl", [common | {"tools": [tool, late]}, common])
    (session,) = tracelab(path)
    assert session.turns == ((3, 5, 2.0), (3, 0, 0.0))


def test_taubench_lengths_give_conversations(tmp_path: Path) -> None:
    columns = "episode,task_id,trial,assistant_turn,role,chars,approx_tokens_chars_div_4\n"
    rows = ["0,4,0,0,system,400,100", "0,4,0,0,user,40,10", "0,4,0,1,assistant,80,20"]
    rows += ["0,4,0,1,tool,120,30", "0,4,0,1,user,20,5", "0,4,0,2,assistant,8,2"]
    (one,) = taubench(written(tmp_path / "lengths.csv", columns + "\n".join(rows)))
    assert one.prompt == ((0, 100), (5, 10))
    assert one.turns == ((20, 35, 0.0), (2, 0, 0.0))


def test_a_length_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    episodes = mooncake(lines(tmp_path / "trace.jsonl", MOONCAKE))
    assert table(written(tmp_path / "table.jsonl", "".join(table_lines(episodes)))) == episodes


# ---- errors

GONE = '[replay]\nformat = "mooncake"\nfile = "gone.jsonl"\n'
TINY = 'path = "tiny-qwen3-moe"\n'
SMALL = """summary = "small"
[job.model]
path = "tiny-qwen3-moe"
[[parts]]
name = "small"
num_prompts = 2
group_size = 2
prompt = 50
turns = 4
generate = { low = 5, high = 20 }
append = 30
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("turns = 4", "truns = 4"), r"bad.toml, line 9: unknown key parts.0.truns; did you mean"),
        (("append = 30", ""), r"bad.toml, line 4: parts.0: append is missing"),
        (("append = 30", "append = 'x'"), r"line 11: parts.0.append = 'x' should be"),
        (("{ low = 5, high = 20 }", "{ low = 5 }"), r"line 10: .*low is given without high"),
        (("{ low = 5, high = 20 }", "{ p50 = 5 }"), r"p50 and at least one other, found p50"),
        (("{ low = 5, high = 20 }", "{ p50 = 9, p90 = 5 }"), r"p50 = 9 is above p90 = 5"),
        (("{ low = 5, high = 20 }", "{ low = 9, high = 5 }"), r"low = 9 is above high = 5"),
        (("{ low = 5, high = 20 }", "{ low = 9, p50 = 5 }"), r"found low/high and p50/p90"),
        (("= 30", "= { value = 3, rare_share = 0.1 }"), r"rare_share and rare_value belong"),
        (
            ("[[parts]]", "[replay]\nformat = 'table'\nfile = 'x'\n[[parts]]"),
            r"either \[\[parts\]\]",
        ),
        (("path =", "pth ="), r"line 3: unknown key job.model.pth; did you mean job.model.path"),
        (("summary", "summary ="), r"bad.toml is not valid TOML"),
    ],
)
def test_a_bad_file_gives_one_clear_error(
    change: tuple[str, str], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_workload(written(tmp_path / "bad.toml", SMALL.replace(*change)))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no workload 'swe': choose one of code-tool, "):
        load_workload("swe")
    with pytest.raises(ConfigError, match=r"cannot read workload file .*none.toml"):
        load_workload(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="no scale 'hour': choose minute or full"):
        load_workload("swe-long", scale="hour")
    text = f'summary = "x"\n{GONE}[job.model]\n{TINY}'
    with pytest.raises(ConfigError, match=r"replay: cannot read .*gone.jsonl: No such file"):
        load_workload(written(tmp_path / "replay.toml", text))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: should be a JSON object"),
        ('{"hash_ids": [0, -1]}', "line 1: hash_ids should be a list of whole numbers"),
        ('{"hash_ids": [0], "input_length": 513}', "line 1: input_length 513 does not fit 1 b"),
        ('{"hash_ids": [0], "input_length": "x"}', "line 1: input_length should be a whole n"),
        ("", "holds no episodes"),
    ],
)
def test_a_bad_recording_names_its_line(row: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        mooncake(written(tmp_path / "bad.jsonl", row))


def test_lengths_are_those_of_the_file_with_the_template_of_the_model() -> None:
    chat = Chat(model_folder(BENCH_MODEL))
    swe = load_workload("swe-long")
    text = prompt_text(swe.tasks[0].params["prompt"])
    opened = chat.open([{"role": "user", "content": text}])
    assert len(opened.token_ids) == swe.episodes[0].num_prompt
