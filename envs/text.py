"""Printable text: the alphabet of the shipped environments, and the spaces over it."""

from __future__ import annotations

import string
from typing import Any

from gymnasium import spaces

ALPHABET = frozenset(string.printable)


def text_space(max_length: int) -> spaces.Text:
    """A space of printable ASCII texts of 0 to `max_length` characters."""
    return spaces.Text(max_length, min_length=0, charset=ALPHABET)


class AnyText(spaces.Text):
    """Texts of 0 to `max_length` characters of any alphabet that UTF-8 can carry; samples are
    printable ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=ALPHABET)

    def contains(self, x: Any) -> bool:
        """See `gymnasium.Space`."""
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        return not any("\ud800" <= c <= "\udfff" for c in x)


def printable(text: str, max_length: int) -> str:
    """`text` as a member of `text_space(max_length)`.

    Characters outside printable ASCII become `?`; what is too long ends in `...`.
    """
    shown = "".join(c if c in ALPHABET else "?" for c in text[: max_length + 1])
    return shown if len(shown) <= max_length else shown[: max(0, max_length - 3)] + "..."
