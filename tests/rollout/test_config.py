from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from interlace.rollout.config import (
    ConfigError,
    Launch,
    Layout,
    RolloutConfig,
    Sampling,
    TaskSection,
)
from interlace.rollout.config_file import load_config, preset_names


def sections(root: type[BaseModel]) -> list[type[BaseModel]]:
    found = [root]
    for field in root.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += sections(kind)
    return found


def test_every_field_is_described() -> None:
    assert len(sections(RolloutConfig)) == 14
    for section in sections(RolloutConfig):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_the_tree_is_frozen_and_hashable_parts_are_tuples() -> None:
    config = RolloutConfig(sampling=Sampling(stop_token_ids=(1, 2)))
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.sampling.top_k = 1
    assert config.sampling.stop_token_ids == (1, 2)


def test_a_tree_survives_json() -> None:
    config = load_config(preset="demo")
    assert RolloutConfig.model_validate_json(config.model_dump_json()) == config


def test_layout_derives_its_group_counts() -> None:
    assert (Layout(world=4).dp, Layout(world=4).ep) == (4, 4)
    assert (Layout(world=4, tp=2).dp, Layout(world=4, tp=2).ep) == (2, 4)
    assert [Layout(world=6, tp=2).leader(group) for group in range(3)] == [0, 2, 4]
    with pytest.raises(ValidationError, match=r"tp=3 does not divide world=4"):
        Layout(world=4, tp=3)


def test_presets_are_complete() -> None:
    assert preset_names() == ["demo", "tiny"]
    demo = load_config(preset="demo")
    assert (demo.model.path, demo.layout.world, demo.launch.kind) == ("smollm2-moe", 2, "ray")
    assert {section.env for section in demo.tasks} == {"frozen_lake", "sqlite", "colossal_cave"}
    assert load_config(preset="tiny").launch.kind == "local"
    for name in preset_names():
        assert load_config(preset=name).expand_tasks()


def test_a_file_and_overrides_become_one_tree(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('seed = 7\n[scheduler]\nchunk_tokens = 64\n[[tasks]]\nenv = "frozen_lake"\n')
    config = load_config(
        job=job,
        overrides=[
            "scheduler.chunk_tokens=32",
            "scheduler.chunk_tokens=16",
            "mode=serial",
            'launch.kind="local"',
            "sampling.stop_strings=['\\n', 'a=b']",
            "sampling.temperature=0",
            "tasks.0.count=3",
            "tasks.0.params.map_name=4x4",
            "tasks.1.env=sqlite",
            "tasks.1.params={rows = 3}",
        ],
    )
    assert (config.seed, config.scheduler.chunk_tokens, config.mode) == (7, 16, "serial")
    assert config.launch == Launch(kind="local")
    assert config.sampling.stop_strings == ("\\n", "a=b")
    assert config.sampling.temperature == 0
    assert config.tasks == (
        TaskSection(env="frozen_lake", count=3, params={"map_name": "4x4"}),
        TaskSection(env="sqlite", params={"rows": 3}),
    )


def test_an_override_that_is_no_toml_is_text_and_cannot_smuggle_keys() -> None:
    assert load_config(overrides=["model.path=a/b c"]).model.path == "a/b c"
    assert load_config(overrides=["model.path='x'\nseed=3"]).model.path == "'x'\nseed=3"


def test_sections_expand_in_order_and_groups_share_seed_and_group_id() -> None:
    config = RolloutConfig(
        tasks=(
            TaskSection(env="frozen_lake", count=2, seed_start=5, group_size=2),
            TaskSection(env="sqlite", params={"rows": 3}, max_tokens=9),
        )
    )
    tasks = config.expand_tasks()
    assert [(t.env, t.seed) for t in tasks] == [
        ("frozen_lake", 5),
        ("frozen_lake", 5),
        ("frozen_lake", 6),
        ("frozen_lake", 6),
        ("sqlite", 0),
    ]
    assert tasks[0].group_id == tasks[1].group_id != tasks[2].group_id
    assert tasks[4].group_id is None
    assert [t.max_tokens for t in tasks] == [None, None, None, None, 9]


def test_groups_of_one_environment_with_other_params_stay_apart() -> None:
    plain, changed = (
        TaskSection(env="sqlite", group_size=2, params=params).expand()[0]
        for params in ({}, {"rows": 3})
    )
    assert plain.group_id != changed.group_id


def test_a_prompt_file_expands_to_its_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"q": "what is {i}?", "a": {i}}}\n' for i in range(3)))
    section = TaskSection(
        file=str(file), count=2, group_size=2, prompt_column="q", answer_column="a"
    )
    tasks = section.expand()
    assert [(t.prompt, t.answer) for t in tasks] == [
        ("what is 0?", 0),
        ("what is 0?", 0),
        ("what is 1?", 1),
        ("what is 1?", 1),
    ]
    assert all(task.env == "prompt" for task in tasks)


JOBS = [
    ("mode = ", "job.toml is not valid TOML: Invalid value"),
    ("mod = 'serial'", "job.toml, line 1: unknown key mod; did you mean mode?"),
    (
        "\n[scheduler]\nchunk_token = 3",
        "job.toml, line 3: unknown key scheduler.chunk_token; did you mean scheduler.chunk_tokens?",
    ),
    ("temperature = 1", "line 1: unknown key temperature; did you mean sampling.temperature?"),
    ("[rewards]\nzzz = 1", "unknown key rewards.zzz; known here: per, reward_fn"),
    (
        "[scheduler]\nchunk_tokens = -3",
        "line 2: scheduler.chunk_tokens = -3 should be greater than or equal to 1",
    ),
    (
        "[[tasks]]\nenv='a'\n[[tasks]]\nenv='b'\ncount=0",
        "line 5: tasks.1.count = 0 should be greater than or equal to 1",
    ),
    ("[[tasks]]\ncount = 1", "line 1: tasks.0: neither env nor file is given"),
    ("[[tasks]]\nenv='a'\nfile='b'", "line 1: tasks.0: both env 'a' and file 'b' are given"),
    ("tasks = 3", "line 1: tasks = 3 should be a list"),
    ("scheduler = 3", "line 1: scheduler = 3 should be a table"),
    ("seed = '3'", "line 1: seed = '3' should be a valid integer"),
    ("seed = 1.5", "line 1: seed = 1.5 should be a valid integer"),
    (
        "mode = 'fast'",
        "mode = 'fast' should be 'serial', 'chunked', 'whole_forward', 'multiplexed', "
        "'disaggregated' or 'replicas'",
    ),
    ("numerics = 'fast'", "line 1: numerics: 'fast' is not built yet; use 'exact'"),
    ("[layout]\nworld = 4\ntp = 3", "line 1: layout: tp=3 does not divide world=4"),
    ("[layout]\nprefill_ranks = 1", "layout.prefill_ranks is of mode disaggregated"),
    ("mode = 'disaggregated'", "needs a group of layout.tp=1 ranks to prefill and one to decode"),
    (
        "mode = 'disaggregated'\n[layout]\nworld = 4\ntp = 2\nprefill_ranks = 3",
        "layout.prefill_ranks=3 of 4 ranks: those that prefill and those that decode are groups",
    ),
    ("[sampling]\ntop_p = 0.0", "line 2: sampling.top_p = 0.0 should be greater than 0"),
    ("[sampling]\ntemperature = inf", "sampling.temperature = inf should be a finite number"),
    ("[sampling]\nstop_token_ids = [-1]", "sampling.stop_token_ids: -1 is no token id"),
    ("[sampling]\nstop_strings = ['']", "sampling.stop_strings: an empty stop string"),
    ("[rewards]\nreward_fn = 'f'", "rewards.reward_fn: 'f' is not of the form module:function"),
    (
        "[scheduler]\nnum_blocks = 0\npark_ms = -1",
        "scheduler.num_blocks = 0 should be greater than or equal to 1 (1 more",
    ),
]


@pytest.mark.parametrize(("text", "message"), JOBS, ids=[job[0] for job in JOBS])
def test_a_wrong_job_is_one_line_with_place_and_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(job=job)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


OVERRIDES = [
    ("scheduler", "--set scheduler: expected key.path=value"),
    ("=3", "--set =3: expected key.path=value"),
    ("scheduler..x=3", "expected key.path=value"),
    ("scheduler.chunk=3", "--set scheduler.chunk=3: unknown key scheduler.chunk; did you mean"),
    ("seed.x=3", "--set seed.x=3: seed is a single value"),
    ("tasks.env=a", "--set tasks.env=a: tasks is a list: use an index"),
    ("tasks.2.env=a", "--set tasks.2.env=a: tasks has 1 entries, so the next is tasks.1"),
    ("0=a", "--set 0=a: the root is a table: use a name"),
    ("seed=true", "--set seed=true: seed = True should be a valid integer"),
    ("layout.tp=2", "--set layout.tp=2: layout: tp=2 does not divide world=1"),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDES, ids=[o[0] for o in OVERRIDES])
def test_a_wrong_override_is_named_as_it_was_given(
    tmp_path: Path, override: str, message: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text("seed = 1\n[[tasks]]\nenv = 'frozen_lake'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(job=job, overrides=[override])
    assert message in str(caught.value)


def test_sources_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes("seed = 1\n# é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.toml, line 2: not UTF-8"):
        load_config(job=latin)
    with pytest.raises(ConfigError, match="there is no job file"):
        load_config(job=tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read job file"):
        load_config(job=tmp_path)
    with pytest.raises(ConfigError, match="no preset 'dmo': choose one of demo, tiny"):
        load_config(preset="dmo")
    with pytest.raises(ConfigError, match="choose one"):
        load_config(job=latin, preset="demo")


def test_half_of_the_ranks_prefill_unless_a_job_says_otherwise(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("mode = 'disaggregated'\n[layout]\nworld = 6\ntp = 2\n")
    layout = load_config(job=job).layout
    assert (layout.prefill_ranks, layout.dp, layout.ep) == (2, 2, 4)
    assert [layout.leader(group) for group in range(layout.dp)] == [2, 4]
    assert layout.prefill_leaders == (0,)
    assert (layout.side(1), layout.side(5)) == ((0, 1), (2, 3, 4, 5))
    layout = load_config(job=job, overrides=["mode=serial"]).layout
    assert (layout.prefill_ranks, layout.dp, layout.ep) == (None, 3, 6)
    assert layout.side(5) == layout.members(["decode"]) == tuple(range(6))


def test_a_config_without_tasks_says_what_to_add() -> None:
    with pytest.raises(ValueError, match=r"no tasks: add a \[\[tasks\]\] section"):
        RolloutConfig().expand_tasks()
