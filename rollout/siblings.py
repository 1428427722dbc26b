"""The blocks that follow one and the same context, found by the tokens they hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

Tokens = tuple[int, ...]


class Child(Protocol):
    """What is kept here."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def number(self) -> int:
        """Who came later has the greater one."""
        ...


C = TypeVar("C", bound=Child)

MOST_REMEMBERED = 64


class Siblings(Generic[C]):
    """Found without looking through all. Where several fit, the one that came first is meant.

    Several may hold the same tokens, computed with other weights.
    """

    __slots__ = ("_first", "_lengths", "_of", "_sorted")

    def __init__(self) -> None:
        self._of: dict[Tokens, list[C]] = {}
        """Tokens -> who holds exactly these, in the order in which they came."""
        self._sorted: list[Tokens] = []
        self._lengths: Counter[int] = Counter()
        """Number of tokens -> how many different contents have so many."""
        self._first: dict[Tokens, C] = {}
        """Some tokens -> of those that begin with them, who came first, as once found. Whoever
        comes later changes nothing, and whoever leaves is taken out."""

    def __len__(self) -> int:
        """How many different contents there are."""
        return len(self._sorted)

    def __iter__(self) -> Iterator[C]:
        for children in self._of.values():
            yield from children

    def holding(self, tokens: Tokens) -> C | None:
        """Who holds exactly these tokens."""
        children = self._of.get(tokens)
        return children[0] if children else None

    def nearest(self, tokens: Tokens) -> tuple[C | None, int]:
        """Who shares most leading tokens with these, and how many; None if nobody shares any."""
        at = bisect_left(self._sorted, tokens)
        length = max(
            (_num_common(held, tokens) for held in self._sorted[max(0, at - 1) : at + 1]),
            default=0,
        )
        return (self._first_with(tokens[:length]), length) if length else (None, 0)

    def related(self, tokens: Tokens) -> list[C]:
        """Those that begin with these tokens or with which these begin, as they came."""
        related = [
            child
            for length in self._lengths
            if length < len(tokens)
            for child in self._of.get(tokens[:length], ())
        ]
        for held in self._beginning_with(tokens):
            related += self._of[held]
        return sorted(related, key=_number)

    def add(self, child: C) -> None:
        children = self._of.setdefault(child.tokens, [])
        if not children:
            insort(self._sorted, child.tokens)
            self._lengths[len(child.tokens)] += 1
        children.append(child)

    def remove(self, child: C) -> None:
        tokens = child.tokens
        children = self._of[tokens]
        children.remove(child)
        if not children:
            del self._of[tokens]
            del self._sorted[bisect_left(self._sorted, tokens)]
            self._lengths[len(tokens)] -= 1
            if not self._lengths[len(tokens)]:
                del self._lengths[len(tokens)]
        self._first = {key: first for key, first in self._first.items() if first is not child}

    def _first_with(self, tokens: Tokens) -> C:
        first = self._first.get(tokens)
        if first is None:
            if len(self._first) == MOST_REMEMBERED:
                self._first.clear()
            found = (self._of[held][0] for held in self._beginning_with(tokens))
            first = self._first[tokens] = min(found, key=_number)
        return first

    def _beginning_with(self, tokens: Tokens) -> list[Tokens]:
        start = bisect_left(self._sorted, tokens)
        beyond = (*tokens[:-1], tokens[-1] + 1)
        return self._sorted[start : bisect_left(self._sorted, beyond, lo=start)]


_number = attrgetter("number")


def _num_common(one: Tokens, other: Tokens) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
