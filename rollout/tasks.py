"""What a rollout works on: environments to play, or prompts to answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROMPT_ENV = "prompt"
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Task:
    """One episode to collect: either an environment by name, or a prompt answered in one turn.

    A task with a prompt has `env == "prompt"`. ValueError if it is neither or both, or if a
    field has the wrong type.
    """

    env: str = PROMPT_ENV
    seed: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment (JSON values)."""
    group_id: str | None = None
    """Tasks whose returns are compared with each other share one."""
    _: KW_ONLY
    prompt: Prompt | None = None
    """Text, messages `{"role": ..., "content": ...}`, or token ids."""
    answer: Any = None
    """Reference answer for a reward function (a JSON value)."""
    max_tokens: int | None = None
    """Most tokens of one turn of this task; None: the job's."""
    task_id: str = ""
    """Names the task in every record; empty: derived from the other fields."""

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) or not self.env:
            raise ValueError(f"env must be a name, found {self.env!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number from 0 on, found {self.seed!r}")
        if self.group_id is not None and not isinstance(self.group_id, str):
            raise ValueError(f"group_id must be a string or None, found {self.group_id!r}")
        if not isinstance(self.params, Mapping):
            raise ValueError(f"params must be a mapping, found {_kind(self.params)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {self.max_tokens}")
        if self.prompt is None and self.env == PROMPT_ENV:
            raise ValueError("a task needs an env or a prompt, found neither")
        if self.prompt is not None:
            if self.env != PROMPT_ENV:
                raise ValueError(f"a task has an env or a prompt, found both (env {self.env!r})")
            object.__setattr__(self, "prompt", check_prompt(self.prompt))
        for name in ("params", "answer"):
            try:
                json.dumps(getattr(self, name))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} is not a JSON value: {error}") from error
        if not self.task_id:
            object.__setattr__(self, "task_id", self._derived_id())

    def _derived_id(self) -> str:
        what = self.prompt if self.prompt is not None else dict(self.params)
        if not what:
            return f"{self.env}-{self.seed}"
        text = json.dumps(what, sort_keys=True)
        return f"{self.env}-{hashlib.sha256(text.encode()).hexdigest()[:8]}-{self.seed}"


def check_prompt(prompt: object) -> str | list[dict[str, str]] | list[int]:
    """The prompt as text, plain messages or token ids; ValueError says what was found instead."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is an empty string")
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValueError(f"a prompt is text, messages or token ids, found {_kind(prompt)}")
    if not prompt:
        raise ValueError("the prompt is an empty list")
    if isinstance(prompt[0], Mapping):
        return _check_messages(prompt)
    token_ids = []
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"item {index} should be a token id, found {_kind(token)}")
        if not 0 <= token < 1 << 31:
            raise ValueError(f"item {index} is no token id: {token}")
        token_ids.append(token)
    return token_ids


def _check_messages(prompt: Sequence[object]) -> list[dict[str, str]]:
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {index} should have role and content, found {_kind(message)}"
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {index} has role {role!r}, known are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {index} should have text as content, found {_kind(content)}")
        messages.append({"role": str(role), "content": content})
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: nothing is left to answer")
    return messages


def tasks_from(
    path: str | Path, *, prompt: str = "prompt", answer: str | None = None, group_size: int = 1
) -> list[Task]:
    """Read one prompt per row of a .jsonl or .parquet file, `group_size` tasks for each.

    `prompt` and `answer` name columns. Tasks keep the file's order; tasks of one row follow each
    other, share `task_id` (and `group_id`, if there are several) and differ in seed. Raises
    ValueError naming file, line (parquet: row) and column for everything that is not as it
    should be: a missing file, no rows, bad JSON, a missing column, a wrong type.
    """
    path = Path(path)
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, found {group_size}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: tasks are read from .jsonl or .parquet, not {path.suffix!r}")
    wanted = [prompt] if answer is None else [prompt, answer]
    tasks: list[Task] = []
    for index, (where, row) in enumerate(readers[path.suffix](path, wanted)):
        for column in wanted:
            if column not in row:
                raise ValueError(f"{where}: no column {column!r}, found {_names(row)}")
        try:
            checked = check_prompt(row[prompt])
        except ValueError as error:
            raise ValueError(f"{where}, column {prompt!r}: {error}") from error
        name = f"{path.stem}-{index}"
        for member in range(group_size):
            try:
                task = Task(
                    seed=index * group_size + member,
                    group_id=name if group_size > 1 else None,
                    prompt=checked,
                    answer=None if answer is None else row[answer],
                    task_id=name,
                )
            except ValueError as error:
                raise ValueError(f"{where}, column {answer!r}: {error}") from error
            tasks.append(task)
    if not tasks:
        raise ValueError(f"{path}: holds no tasks")
    return tasks


def _jsonl_rows(path: Path, columns: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: should be a JSON object, found {_kind(row)}")
            yield where, row


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        for column in columns:
            if column not in names:
                raise ValueError(f"{path}: no column {column!r}, found {_names(names)}")
        number = 0
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row


def _names(columns: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(column) for column in columns) or "none"


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
