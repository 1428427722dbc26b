"""Printable text: the alphabet of the shipped environments, and the spaces over it."""

from __future__ import annotations

import string

from gymnasium import spaces

ALPHABET = frozenset(string.printable)


def text_space(max_length: int) -> spaces.Text:
    """A space of printable ASCII texts of 0 to `max_length` characters."""
    return spaces.Text(max_length, min_length=0, charset=ALPHABET)


def printable(text: str, max_length: int) -> str:
    """`text` as a member of `text_space(max_length)`.

    Characters outside printable ASCII become `?`; what is too long ends in `...`.
    """
    shown = "".join(c if c in ALPHABET else "?" for c in text[: max_length + 1])
    return shown if len(shown) <= max_length else shown[: max(0, max_length - 3)] + "..."
