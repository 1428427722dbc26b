"""From a TOML file, a preset and overrides to one `RolloutConfig`, or to one clear error."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from interlace.rollout.config import ConfigError, RolloutConfig

KeyPath = tuple[str | int, ...]
Tree = TypeVar("Tree", bound=BaseModel)


def preset_names() -> list[str]:
    """The presets that come with the package, sorted."""
    folder = resources.files("interlace.rollout") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name[-5:] == ".toml")


def load_config(
    *, job: Path | None = None, preset: str | None = None, overrides: Sequence[str] = ()
) -> RolloutConfig:
    """A complete, valid tree; every failure is one `ConfigError` with what, where and what to do.

    Starts from `job` (a TOML file), from `preset`, or from the defaults, then applies each
    override ``key.path=value`` in order. Values are TOML, and text where they are not;
    ``tasks.0.count=3`` addresses a list entry, and an index one past the end adds one.
    """
    if job is not None and preset is not None:
        raise ConfigError(f"both a job file ({job}) and preset {preset!r} are given: choose one")
    source, text = _read_source(job, preset)
    values = _parsed(text, source)
    if preset is not None and "unsafe" in values:
        raise ConfigError(f"{source} holds [unsafe], which only a job file or --set may bring")
    places = {path: f"{source}, line {line}" for path, line in _key_lines(text)}
    for override in overrides:
        path, value = _parse_override(override)
        _set_value(values, path, value, override)
        places[path] = f"--set {override}"
    return _validated(RolloutConfig, values, places, source)


def read_toml(tree: type[Tree], text: str, source: str) -> Tree:
    """A valid `tree` from TOML; every failure is one `ConfigError` that begins with `source`."""
    places = {path: f"{source}, line {line}" for path, line in _key_lines(text)}
    return _validated(tree, _parsed(text, source), places, source)


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error


def _validated(
    tree: type[Tree], values: Mapping[str, Any], places: Mapping[KeyPath, str], source: str
) -> Tree:
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(tree, error.errors(), places, source)) from error


def _read_source(job: Path | None, preset: str | None) -> tuple[str, str]:
    if preset is not None:
        if preset not in preset_names():
            known = ", ".join(preset_names())
            raise ConfigError(f"there is no preset {preset!r}: choose one of {known}")
        file = resources.files("interlace.rollout") / "presets" / f"{preset}.toml"
        return f"preset {preset}", file.read_text(encoding="utf-8")
    if job is None:
        return "defaults", ""
    try:
        return str(job), job.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no job file {job}: check the path, or use --preset") from error
    except OSError as error:
        raise ConfigError(f"cannot read job file {job}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{job}, line {line}: not UTF-8 text: save it as UTF-8") from error


def _key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Where each key of a TOML text stands; keys it cannot place are left out."""
    table: KeyPath = ()
    entries: dict[KeyPath, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[(\[?)\s*([\w.\-]+)\s*\]", line):
            table = tuple(header[2].split("."))
            if header[1]:
                entries[table] = entries.get(table, -1) + 1
            table = _with_entry(table, entries)
            yield table, number
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            yield (*table, *key[1].split(".")), number


def _with_entry(table: KeyPath, entries: Mapping[KeyPath, int]) -> KeyPath:
    for length in range(len(table), 0, -1):
        if table[:length] in entries:
            return (*table[:length], entries[table[:length]], *table[length:])
    return table


def _parse_override(override: str) -> tuple[KeyPath, Any]:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(
            f"--set {override}: expected key.path=value, as in --set scheduler.chunk_tokens=128"
        )
    path = tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return path, text
    return path, parsed["value"] if parsed.keys() == {"value"} else text


def _set_value(values: Any, path: KeyPath, value: Any, override: str) -> None:
    at = values
    for depth, part in enumerate(path):
        where = _dotted(path[:depth]) or "the root"
        last = depth == len(path) - 1
        if isinstance(at, list) and isinstance(part, int):
            if part > len(at):
                raise ConfigError(
                    f"--set {override}: {where} has {len(at)} entries, so the next is "
                    f"{_dotted((*path[:depth], len(at)))}"
                )
            if part == len(at):
                at.append({})
        elif isinstance(at, dict) and isinstance(part, str):
            if not last and part not in at:
                at[part] = [] if isinstance(path[depth + 1], int) else {}
        else:
            kind = "a single value without keys"
            if isinstance(at, dict | list):
                kind = "a list: use an index" if isinstance(at, list) else "a table: use a name"
            raise ConfigError(f"--set {override}: {where} is {kind}")
        if last:
            at[part] = value
        else:
            at = at[part]


def _describe(
    tree: type[BaseModel],
    errors: Sequence[ErrorDetails],
    places: Mapping[KeyPath, str],
    source: str,
) -> str:
    first = errors[0]
    path = first["loc"]
    place = _place(path, places) or source
    more = f" ({len(errors) - 1} more of this kind behind it)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {_dotted(path)}; {_suggestion(tree, path)}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        whole = "the job" if tree is RolloutConfig else "the file"
        return f"{place}: {_dotted(path) or whole}: {message}{more}"
    if first["type"] == "missing":
        return f"{place}: {_dotted(path)} is missing: add it{more}"
    message = {
        "tuple_type": "should be a list",
        "model_type": "should be a table of keys and values",
    }.get(first["type"], message.removeprefix("Input "))
    value = repr(first["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"{place}: {_dotted(path)} = {value} {message}{more}"


def _place(path: KeyPath, places: Mapping[KeyPath, str]) -> str | None:
    """What set `path`: an override at or inside it, else the nearest line of the file."""
    inside = [place for key, place in places.items() if path and key[: len(path)] == path]
    overrides = [place for place in inside if place.startswith("--set ")]
    around = [places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places]
    return next(iter([*overrides[::-1], *around, *inside]), None)


def _suggestion(tree: type[BaseModel], path: KeyPath) -> str:
    """The known key a wrong one was probably meant to be."""
    name = str(path[-1])
    known = _known_keys(tree)
    siblings = [key for key in known if key[:-1] == _without_indices(path[:-1])]
    near = difflib.get_close_matches(name, [key[-1] for key in siblings], n=1, cutoff=0.5)
    if near:
        return f"did you mean {_dotted((*path[:-1], near[0]))}?"
    elsewhere = [key for key in known if key[-1] == name]
    if elsewhere:
        return f"did you mean {_dotted(elsewhere[0])}?"
    return "known here: " + ", ".join(sorted(key[-1] for key in siblings))


def _known_keys(section: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append((*prefix, name))
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, (*prefix, name))
    return keys


def _without_indices(path: KeyPath) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))
