"""The job file `interlace init` writes: every key with its meaning, and one thing to run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .config_fields import ConfigField, ConfigSection, config_sections

_WIDTH = 96
_INTRODUCTION = """\
# A job for Interlace. Run it: interlace rollout job.toml --out out/first
# Every key is here with its meaning. "#key = value", without a space, shows a default: remove the #
# to change it. docs/config.md has the same as tables."""

_TASKS = {"env": '"frozen_lake"', "count": "4"}
"""What the template's only tasks section sets, so that it can be run as it is."""


def job_template() -> str:
    """A commented job.toml that loads and runs unchanged."""
    return "\n\n".join([_INTRODUCTION, *map(_section, config_sections())]) + "\n"


def _section(section: ConfigSection) -> str:
    given = _TASKS if section.repeated else {}
    lines = list(_comment(section.summary)) if section.name else []
    if section.name:
        lines.append(f"[[{section.name}]]" if section.repeated else f"[{section.name}]")
    entries = ["\n".join(_entry(field, given.get(field.name))) for field in section.fields]
    return "\n".join([*lines, *entries])


def _entry(field: ConfigField, given: str | None) -> Iterator[str]:
    yield from _comment(f"{field.description} ({field.kind})")
    if given is not None:
        yield f"{field.name} = {given}"
    elif field.default is None:
        yield f"#{field.name} =    # not set"
    else:
        yield f"#{field.name} = {field.default}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
