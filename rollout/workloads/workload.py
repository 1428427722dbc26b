"""From a workload file to tasks with every number fixed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from interlace.rollout.cache import model_folder
from interlace.rollout.chat import Chat
from interlace.rollout.config import ConfigError
from interlace.rollout.config_file import read_toml
from interlace.rollout.tasks import Task

from .episodes import Least, Planned, drawn, replayed
from .recordings import READERS
from .sections import Scale, WorkloadFile

FULL = Scale()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks that do the same work in every mode, and the job they are meant for."""

    name: str
    summary: str
    scale: Scale
    episodes: tuple[Planned, ...]
    """What the tasks will play, in their order."""
    tasks: tuple[Task, ...]
    overrides: tuple[str, ...]
    """For `load_config`, before those of whoever runs it: ``key.path=value``."""


def workload_names() -> list[str]:
    """The workloads that come with the package, sorted."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def load_workload(
    name_or_path: str | Path,
    *,
    scale: str | Scale = "minute",
    model: str | None = None,
    sleep: bool = True,
) -> Workload:
    """The same tasks, byte for byte, for the same file, scale and model.

    `scale` is "minute", "full" or factors of one's own. `model` (a name or a folder; the file's by
    default) is only asked what its chat template writes around a text: that much less text is
    given, so that lengths are those of the file, template included. Without `sleep` nobody waits
    for latencies, resets and penalties.

    Raises ConfigError naming the file, and the line where there is one.
    """
    path = _path_of(name_or_path)
    try:
        file = read_toml(WorkloadFile, path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read workload file {path}: {error}") from error
    chosen = _scale_of(file, scale)
    model = model or file.job.model.path
    around = _around(Chat(model_folder(model)), file)
    episodes = _episodes(file, path, chosen, around)
    return Workload(
        name=path.stem,
        summary=file.summary,
        scale=chosen,
        episodes=tuple(episodes),
        tasks=tuple(
            _task(path.stem, number, one, around, sleep) for number, one in enumerate(episodes)
        ),
        overrides=tuple(_overrides(file, model, len(episodes))),
    )


def _folder() -> Path:
    return Path(str(resources.files("interlace.experiments"))) / "workloads"


def _path_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return path
    if str(name_or_path) not in workload_names():
        raise ConfigError(
            f"there is no workload {str(name_or_path)!r}: choose one of "
            f"{', '.join(workload_names())}, or give the path of a .toml file"
        )
    return _folder() / f"{name_or_path}.toml"


def _scale_of(file: WorkloadFile, scale: str | Scale) -> Scale:
    if isinstance(scale, Scale):
        return scale
    named = {"minute": file.minute, "full": FULL}
    if scale not in named:
        raise ConfigError(f"there is no scale {scale!r}: choose minute or full, or give a Scale")
    return named[scale]


def _around(chat: Chat, file: WorkloadFile) -> Least:
    """What the template writes around one token, and that token."""
    opening = chat.open([{"role": "user", "content": "x"}])
    single = file.replay is None and all(part.append is None for part in file.parts)
    reply = opening if single else chat.reply("x", closed=False)
    return Least(prompt=len(opening.token_ids), append=len(reply.token_ids))


def _episodes(file: WorkloadFile, path: Path, scale: Scale, around: Least) -> list[Planned]:
    if file.replay is None:
        return drawn(file.parts, file.seed, scale, around)
    try:
        recorded = READERS[file.replay.format](path.parent / file.replay.file)
    except ValueError as error:
        raise ConfigError(f"{path}: replay: {error}") from error
    episodes = replayed(recorded, file.seed, scale, around, file.replay.max_context)
    if not episodes:
        raise ConfigError(f"{path}: replay.max_context leaves no episode: every prompt is longer")
    return episodes


def _task(name: str, number: int, one: Planned, around: Least, sleep: bool) -> Task:
    params: dict[str, Any] = {
        "prompt": _shortened(one.prompt, around.prompt - 1),
        "turns": [
            [turn.generate, max(1, turn.append - around.append + 1), turn.wait_s, turn.retries]
            for turn in one.turns
        ],
        "reset_s": one.reset_s,
        "sleep": sleep,
    }
    group = f"{name}-{one.part}-{one.group}"
    return Task("scripted", seed=number, params=params, group_id=group, task_id=group)


def _shortened(pieces: Sequence[tuple[int, int]], num: int) -> list[list[int]]:
    """Without `num` tokens at the end, but for one."""
    kept, room = [], max(1, sum(length for _, length in pieces) - num)
    for seed, length in pieces:
        if room:
            kept.append([seed, min(length, room)])
            room -= min(length, room)
    return kept


def _overrides(file: WorkloadFile, model: str, num_episodes: int) -> Iterator[str]:
    given = file.job.model_dump(exclude_unset=True)
    given.setdefault("model", {})["path"] = model
    places = given.setdefault("environments", {})
    # All at once, as in training: waiting costs nothing, and only the scheduler decides who runs.
    places.setdefault("num_processes", 1)
    places.setdefault("episodes_per_process", num_episodes)
    yield from _flat(given, ())


def _flat(values: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*prefix, key))
        else:
            shown = json.dumps(list(value) if isinstance(value, tuple) else value)
            yield f"{'.'.join((*prefix, key))}={shown}"
