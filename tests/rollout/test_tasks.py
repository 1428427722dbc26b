from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlace.rollout.tasks import Task, tasks_from

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def lines(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_a_task_names_an_environment():
    task = Task("lake", 7, {"size": 4}, "group")
    assert (task.env, task.seed, task.params, task.group_id) == ("lake", 7, {"size": 4}, "group")
    assert task.task_id == Task("lake", 7, {"size": 4}).task_id
    assert task.task_id != Task("lake", 7, {"size": 8}).task_id
    assert Task("lake", 7).task_id == "lake-7"


@pytest.mark.parametrize("prompt", ["2 + 2?", MESSAGES, [1, 2, 3]])
def test_a_task_carries_a_prompt(prompt):
    task = Task(prompt=prompt, answer={"value": 4})
    assert task.prompt == prompt
    assert task.env == "prompt"
    assert task.task_id.startswith("prompt-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "an env or a prompt, found neither"),
        ({"env": "lake", "prompt": "x"}, "found both"),
        ({"env": ""}, "env must be a name"),
        ({"env": "lake", "seed": -1}, "seed must be"),
        ({"env": "lake", "seed": True}, "seed must be"),
        ({"env": "lake", "params": [1]}, "params must be a mapping"),
        ({"env": "lake", "params": {"x": object()}}, "params is not a JSON value"),
        ({"env": "lake", "group_id": 3}, "group_id must be"),
        ({"prompt": ""}, "empty string"),
        ({"prompt": []}, "empty list"),
        ({"prompt": 3}, "text, messages or token ids, found int '3'"),
        ({"prompt": [1, -2]}, "item 1 is no token id: -2"),
        ({"prompt": [1, "x"]}, "item 1 should be a token id, found str 'x'"),
        ({"prompt": [{"role": "robot", "content": ""}]}, "message 0 has role 'robot', known are"),
        ({"prompt": [{"role": "user"}]}, "message 0 should have text as content, found nothing"),
        ({"prompt": [*MESSAGES, {"role": "assistant", "content": "4"}]}, "nothing is left"),
        ({"prompt": "x", "answer": object()}, "answer is not a JSON value"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Task(**arguments)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tasks_are_read_in_order_with_answers(tmp_path, kind):
    path = tmp_path / f"sums.{kind}"
    rows = [{"question": [1, 2], "gold": 3}, {"question": [4], "gold": 5}]
    if kind == "jsonl":
        path.write_text(lines(*rows) + "\n\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    tasks = tasks_from(path, prompt="question", answer="gold")
    assert [(task.prompt, task.answer) for task in tasks] == [([1, 2], 3), ([4], 5)]
    assert [task.task_id for task in tasks] == ["sums-0", "sums-1"]
    assert [task.group_id for task in tasks] == [None, None]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_are_read_as_they_are(tmp_path, kind):
    path = tmp_path / f"chat.{kind}"
    if kind == "jsonl":
        path.write_text(lines({"prompt": MESSAGES}))
    else:
        pq.write_table(pa.Table.from_pylist([{"prompt": MESSAGES}]), path)
    assert tasks_from(path)[0].prompt == MESSAGES


def test_a_group_shares_its_row_and_differs_in_seed(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"prompt": "x"}, {"prompt": "y"}))
    tasks = tasks_from(tmp_path / "a.jsonl", group_size=2)
    assert [task.prompt for task in tasks] == ["x", "x", "y", "y"]
    assert [task.group_id for task in tasks] == ["a-0", "a-0", "a-1", "a-1"]
    assert [task.seed for task in tasks] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.jsonl: holds no tasks"),
        ("{}", r"t\.jsonl, line 1: no column 'prompt', found none"),
        ('{"prompt": "x"}\n{"text": "y"}', r"line 2: no column 'prompt', found 'text'"),
        ('{"prompt": "x"}\n{"prompt": ', r"line 2: not JSON"),
        ('["x"]', r"line 1: should be a JSON object, found list"),
        ('{"prompt": [3, -1]}', r"line 1, column 'prompt': item 1 is no token id: -1"),
        ('\n{"prompt": null}', r"line 2, column 'prompt': .* found nothing"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        tasks_from(tmp_path / "t.jsonl")


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.jsonl: no such file"):
        tasks_from(tmp_path / "no.jsonl")
    for name, message in (("t.csv", "not '.csv'"), ("t.parquet", "not a parquet file")):
        (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match=message):
            tasks_from(tmp_path / name)


def test_bad_bytes_are_a_bad_line(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        tasks_from(tmp_path / "t.jsonl")


def test_a_bad_parquet_row_or_column_is_named(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt": [[1], [-5]], "gold": [b"x", b"y"]}), path)
    with pytest.raises(ValueError, match=r"row 2, column 'prompt': item 0 is no token id: -5"):
        tasks_from(path)
    with pytest.raises(ValueError, match=r"no column 'text', found 'prompt', 'gold'"):
        tasks_from(path, prompt="text")
    with pytest.raises(ValueError, match=r"row 1, column 'gold': answer is not a JSON value"):
        tasks_from(path, answer="gold")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match="holds no tasks"):
        tasks_from(path)


def test_a_group_has_members(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        tasks_from(tmp_path / "t.jsonl", group_size=0)
