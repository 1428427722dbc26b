"""What a model's reply holds besides talk: a block of code, a final answer."""

from __future__ import annotations

import re

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_ANSWER = re.compile(r"^[\s*]*answer\s*:[ \t*]*", re.IGNORECASE | re.MULTILINE)


def code_in(reply: str, *languages: str) -> str:
    """The first fenced block of `reply`, else all of it. A first word that is none of `languages`,
    in any case, belongs to the code: some begin right behind the fence."""
    fenced = _FENCE.search(reply)
    if fenced is None:
        return reply
    tag, code = fenced.groups()
    return code if tag.lower() in ("", *languages) else reply[fenced.start(1) : fenced.end(2)]


def prose_in(reply: str) -> str:
    """`reply` without its fenced blocks."""
    return _FENCE.sub("", reply)


def answer_in(reply: str) -> str | None:
    """The rest of the last line that begins with `ANSWER:`, in any case; None without one."""
    rest = answer_block_in(reply)
    return None if rest is None else rest.partition("\n")[0]


def answer_block_in(reply: str) -> str | None:
    """Everything behind the last `ANSWER:` at the beginning of a line; None without one."""
    found = list(_ANSWER.finditer(reply))
    return reply[found[-1].end() :] if found else None
