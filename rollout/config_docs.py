"""docs/config.md, written from the configuration tree: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator

from interlace.rollout.config_fields import ConfigSection, config_sections

_INTRODUCTION = """\
# Configuration

Every key of a job file. This page is written by `make docs` from `rollout/config.py`.

A job is a TOML file; `interlace init` writes one with all keys as comments. On the command line
`--set section.key=value` changes one, and `tasks.0.count` is the count of the first `[[tasks]]`. In
Python `load_config(job=..., preset=..., overrides=[...])` reads the same. Unknown keys and values
out of range are errors that name file and line."""


def config_markdown() -> str:
    """The page; it ends with a newline and changes only with the tree."""
    return "\n\n".join([_INTRODUCTION, *map(_section, config_sections())]) + "\n"


def _section(section: ConfigSection) -> str:
    title = f"[[{section.name}]]" if section.repeated else f"[{section.name}]"
    heading = f"`{title}`" if section.name else "On top of the file"
    return f"## {heading}\n\n{section.summary}\n\n" + "\n".join(_rows(section))


def _rows(section: ConfigSection) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for field in section.fields:
        default = "not set" if field.default is None else f"`{field.default}`"
        yield f"| `{field.name}` | {field.kind} | {default} | {field.description} |"


if __name__ == "__main__":
    print(config_markdown(), end="")
