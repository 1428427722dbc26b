"""The configuration tree as a list of documented fields: what init and the reference page print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """One key of one section, in words."""

    name: str
    kind: str
    """What may stand there: its type, its range or its choices."""
    default: str | None
    """As TOML; None where the key is unset by default."""
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """One table of the TOML file; the keys on top of the file are in the section named ""."""

    name: str
    summary: str
    repeated: bool
    """Whether the file holds any number of it, each under ``[[name]]``."""
    fields: tuple[ConfigField, ...]


def config_sections() -> list[ConfigSection]:
    """Every key there is, in the order of the tree."""
    first_line = (RolloutConfig.__doc__ or "").splitlines()[0]
    top = [
        _field(name, info)
        for name, info in RolloutConfig.model_fields.items()
        if _section(info) is None
    ]
    return [
        ConfigSection(name="", summary=first_line, repeated=False, fields=tuple(top)),
        *_subsections(),
    ]


def _subsections() -> Iterator[ConfigSection]:
    for name, info in RolloutConfig.model_fields.items():
        section = _section(info)
        if section is not None:
            yield ConfigSection(
                name=name,
                summary=(section.__doc__ or "").splitlines()[0],
                repeated=get_origin(info.annotation) is tuple,
                fields=tuple(_field(key, own) for key, own in section.model_fields.items()),
            )


def _section(info: FieldInfo) -> type[BaseModel] | None:
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _field(name: str, info: FieldInfo) -> ConfigField:
    default = info.get_default(call_default_factory=True)
    return ConfigField(
        name=name,
        kind=_kind(info),
        default=None if default is None else _toml(default),
        description=" ".join((info.description or "").split()),
    )


def _kind(info: FieldInfo) -> str:
    annotation: Any = info.annotation
    inner = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(json.dumps, inner))
    if get_origin(annotation) is tuple and get_origin(inner[0]) is Literal:
        return "list of " + ", ".join(map(json.dumps, get_args(inner[0])))
    if get_origin(annotation) is tuple:
        return f"list of {_NAMES[inner[0]][1]}"
    if get_origin(annotation) is dict:
        return "table"
    kind = annotation if isinstance(annotation, type) else inner[0]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        keys = [f"{name} ({_kind(own)})" for name, own in kind.model_fields.items()]
        return f"table of {', '.join(keys)}"
    return _NAMES[kind][0] + _range(info.metadata)


_NAMES = {
    bool: ("true or false", "true or false"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "texts"),
}


def _range(metadata: list[Any]) -> str:
    words = []
    for limit in metadata:
        match limit:
            case Ge():
                words.append(f"at least {limit.ge}")
            case Gt():
                words.append(f"above {limit.gt}")
            case Le():
                words.append(f"at most {_power_of_two(limit.le)}")
            case Lt():
                words.append(f"below {limit.lt}")
            case MinLen() if limit.min_length == 1:
                words.append("not empty")
    return ", " + ", ".join(words) if words else ""


def _power_of_two(limit: Any) -> str:
    large = isinstance(limit, int) and limit > 1 << 32
    return f"2**{limit.bit_length()} - 1" if large and not limit & (limit + 1) else str(limit)


def _toml(value: Any) -> str:
    """A default as TOML writes it; JSON's spelling is the same for all of them."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
