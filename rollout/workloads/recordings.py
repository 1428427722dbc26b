"""Recorded episodes: published trace files, and the small length tables of this package.

Every reader takes a path and answers with episodes in the order of the file, or raises ValueError
naming file, line and what is wrong there. No text is read, only lengths and times.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, and what it holds."""

MOONCAKE_BLOCK = 512
"""Tokens of one entry of `hash_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One episode as it was."""

    arrival_s: float
    """When it began, from the first one on."""
    prompt: tuple[tuple[int, int], ...]
    """Pieces (label, tokens); the same label at the same place is the same text."""
    turns: tuple[tuple[int, int, float], ...]
    """Tokens generated, tokens appended behind them, seconds of the environment between."""


def mooncake(path: Path) -> list[Recorded]:
    """Requests of a Mooncake trace (JSON Lines), each an episode of one turn.

    Blocks of a prompt that occur once in the whole file become one piece.
    """
    rows = [(where, row, _numbers(where, row, "hash_ids")) for where, row in _json_lines(path)]
    used = Counter(block for _, _, blocks in rows for block in blocks)
    label = max(used, default=0) + 1
    episodes = []
    for where, row, blocks in rows:
        length = _number(where, row, "input_length")
        if not 0 < length <= MOONCAKE_BLOCK * len(blocks):
            raise ValueError(f"{where}: input_length {length} does not fit {len(blocks)} blocks")
        pieces: list[tuple[int, int]] = []
        for place, block in enumerate(blocks):
            num = min(MOONCAKE_BLOCK, length - MOONCAKE_BLOCK * place)
            if num < 1:
                break
            if used[block] == 1 and pieces and pieces[-1][0] == label:
                pieces[-1] = label, pieces[-1][1] + num
            else:
                pieces.append((label if used[block] == 1 else block, num))
        label += 1
        generated = _number(where, row, "output_length")
        episodes.append(
            Recorded(
                arrival_s=_number(where, row, "timestamp") / 1000,
                prompt=tuple(pieces),
                turns=((max(1, generated), 0, 0.0),),
            )
        )
    return _from_the_first(path, episodes)


def tracelab(path: Path) -> list[Recorded]:
    """Sessions of TraceLab: its replay tables (.csv) or its round traces (.jsonl).

    What a session found in a cache before its first round is one text, the same for all. A later
    round appends what was new in it, whatever the cache still held of the rest.
    """
    rounds = _tracelab_csv(path) if path.suffix == ".csv" else _tracelab_jsonl(path)
    sessions: dict[str, list[_Round]] = {}
    for one in rounds:
        sessions.setdefault(one.session, []).append(one)
    episodes = []
    for label, session in enumerate(sessions.values(), start=1):
        first = session[0]
        appended = [one.appended for one in session[1:]] + [0]
        turns = [
            (max(1, one.generated), append, one.wait_s)
            for one, append in zip(session, appended, strict=True)
        ]
        prompt = [(0, first.prefix), (label, first.appended)]
        episodes.append(
            Recorded(
                arrival_s=first.arrival_s,
                prompt=tuple(piece for piece in prompt if piece[1]) or ((label, 1),),
                turns=tuple(turns),
            )
        )
    return _from_the_first(path, episodes)


def taubench(path: Path) -> list[Recorded]:
    """Conversations of a table of message lengths made from tau-bench's trajectories.

    Columns: episode, task_id, assistant_turn, role, approx_tokens_chars_div_4. What others say
    behind a turn of the assistant is appended; one more message of the assistant is a new turn.
    All have one system message, trials of a task one first message. No times are known.
    """
    episodes: dict[int, tuple[list[tuple[int, int]], list[list[int]]]] = {}
    for where, row in _csv_rows(path):
        prompt, turns = episodes.setdefault(_number(where, row, "episode"), ([], []))
        num, role = _number(where, row, "approx_tokens_chars_div_4"), row.get("role")
        if role == "assistant":
            turns.append([max(1, num), 0])
        elif turns:
            turns[-1][1] += num
        elif num:
            label = 0 if role == "system" else 1 + _number(where, row, "task_id")
            prompt.append((label, num))
    return [
        Recorded(
            arrival_s=0.0,
            prompt=tuple(prompt),
            turns=tuple((generate, append, 0.0) for generate, append in turns),
        )
        for prompt, turns in episodes.values()
        if prompt and turns
    ] or _nothing(path)


def table(path: Path) -> list[Recorded]:
    """A length table: JSON Lines of arrival_s, prompt and turns, as in `Recorded`."""
    episodes = []
    for where, row in _json_lines(path):
        try:
            episodes.append(
                Recorded(
                    arrival_s=float(row["arrival_s"]),
                    prompt=tuple((int(label), int(num)) for label, num in row["prompt"]),
                    turns=tuple((int(g), int(a), float(s)) for g, a, s in row["turns"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: no episode of a length table: {error!r}") from error
        if not episodes[-1].prompt or not episodes[-1].turns:
            raise ValueError(f"{where}: prompt and turns need at least one entry each")
    return episodes or _nothing(path)


def table_lines(episodes: Sequence[Recorded]) -> Iterator[str]:
    """The lines of a length table; `table` reads them back."""
    for one in episodes:
        row = {"arrival_s": one.arrival_s, "prompt": one.prompt, "turns": one.turns}
        yield json.dumps(row, separators=(",", ":")) + "\n"


READERS: Mapping[str, Callable[[Path], list[Recorded]]] = {
    "table": table,
    "mooncake": mooncake,
    "tracelab": tracelab,
    "taubench": taubench,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    session: str
    arrival_s: float
    prefix: int
    appended: int
    generated: int
    wait_s: float


def _tracelab_csv(path: Path) -> Iterator[_Round]:
    for where, row in _csv_rows(path):
        yield _Round(
            session=str(row.get("session_id")),
            arrival_s=_number(where, row, "arrival_time") / 1000 if "arrival_time" in row else 0.0,
            prefix=_number(where, row, "prefix_len"),
            appended=_number(where, row, "input_len"),
            generated=_number(where, row, "output_len"),
            wait_s=_number(where, row, "tool_wait_after_ms") / 1000,
        )


def _tracelab_jsonl(path: Path) -> Iterator[_Round]:
    for where, row in _json_lines(path):
        yield _Round(
            session=str(row.get("session_id")),
            arrival_s=0.0,
            prefix=_number(where, row, "prefix_tokens"),
            appended=_number(where, row, "newly_append_tokens"),
            generated=_number(where, row, "output_tokens"),
            wait_s=_tool_time(where, row),
        )


def _tool_time(where: str, row: Mapping[str, Any]) -> float:
    """From the first call of a tool in a round to the last result."""
    try:
        tools = [tool for tool in row.get("tools") or () if tool.get("result_at")]
        if not tools:
            return 0.0
        begin = min(datetime.fromisoformat(tool["emitted_at"]) for tool in tools)
        end = max(datetime.fromisoformat(tool["result_at"]) for tool in tools)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: its tools have no readable times: {error!r}") from error
    return max(0.0, (end - begin).total_seconds())


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: should be a JSON object")
        yield where, row


def _csv_rows(path: Path) -> Iterator[Row]:
    lines = csv.DictReader(_text(path).splitlines())
    for row in lines:
        yield f"{path}, line {lines.line_num}", row


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error


def _number(where: str, row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    try:
        number = int(value) if isinstance(value, int | str) else None
    except ValueError:
        number = None
    if number is None or number < 0:
        raise ValueError(f"{where}: {key} should be a whole number from 0 on, found {value!r}")
    return number


def _numbers(where: str, row: Mapping[str, Any], key: str) -> list[int]:
    value = row.get(key)
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise ValueError(f"{where}: {key} should be a list of whole numbers, found {value!r}")
    return value


def _from_the_first(path: Path, episodes: Sequence[Recorded]) -> list[Recorded]:
    """In the order of arrival, which counts from the first."""
    if not episodes:
        return _nothing(path)
    first = min(one.arrival_s for one in episodes)
    moved = [
        Recorded(arrival_s=round(one.arrival_s - first, 6), prompt=one.prompt, turns=one.turns)
        for one in episodes
    ]
    return sorted(moved, key=lambda one: one.arrival_s)


def _nothing(path: Path) -> list[Recorded]:
    raise ValueError(f"{path}: holds no episodes")
