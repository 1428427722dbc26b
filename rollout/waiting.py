"""Who waits in a group, in order of arrival, however many they are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from .sequence import Sequence as Turn

_Key = tuple[int, int, tuple[int, ...]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Kin:
    """Sequences without blocks that begin with the same `depth` whole blocks. As long as the first
    block that is not cached is among these, it is the same one for all of them."""

    key: _Key
    """Oldest weights they may find in the cache, `depth`, and the tokens of these blocks."""
    arrivals: list[int] = field(default_factory=list)
    """Ascending."""

    @property
    def depth(self) -> int:
        return self.key[1]


class Waiting:
    """Those that have not begun (they hold no blocks), and those that have.

    Iterated in the order in which they began to wait. Those that are aborted or held wait as well,
    but a `Walk` does not meet them.
    """

    def __init__(self, *, block_size: int, is_held: Callable[[Turn], bool]) -> None:
        self._block_size, self._is_held = block_size, is_held
        self._entered: dict[Turn, int] = {}
        self._num_entered = 0
        self._begun: dict[Turn, None] = {}
        self._held: dict[Turn, None] = {}
        self._aborted: dict[Turn, None] = {}
        self._kin_of: dict[Turn, _Kin] = {}
        """All others."""
        self._kin: dict[_Key, _Kin] = {}
        self._turns: dict[int, Turn] = {}
        """By arrival, those in some kin."""
        self._heads: list[int] = []
        """Arrival of the first of each kin, ascending."""

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, sequence: Turn) -> bool:
        return sequence in self._entered

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._entered)

    @property
    def begun(self) -> list[Turn]:
        """Those that have begun and may go on, in order of arrival."""
        able = (sequence for sequence in self._begun if not self._is_held(sequence))
        return sorted(able, key=_arrival)

    @property
    def aborted(self) -> list[Turn]:
        """In the order in which they began to wait."""
        return sorted(self._aborted, key=self._entered.__getitem__)

    @property
    def first_new(self) -> Turn | None:
        """Who came first of those that have not begun and may."""
        return self._turns[self._heads[0]] if self._heads else None

    def add(self, sequence: Turn) -> None:
        self._entered[sequence] = self._num_entered
        self._num_entered += 1
        self._place(sequence)

    def remove(self, sequence: Turn) -> None:
        self._displace(sequence)
        del self._entered[sequence]

    def changed(self, sequence: Turn) -> None:
        """Its blocks, the weights it may use or its fate are others than when it came."""
        self._displace(sequence)
        self._place(sequence)

    def release(self) -> None:
        """Some that were held may be so no more."""
        for sequence in [s for s in self._held if not self._is_held(s)]:
            self.changed(sequence)

    def walk(self, *, passes_over: Callable[[Turn], int], version: Callable[[], int]) -> Walk:
        """`passes_over`: 0, or by how many of its leading blocks a new sequence is to be passed
        over, as is everybody who begins with them; that may change only with `version`."""
        return Walk(self, passes_over, version)

    # ---- for a walk

    def turn(self, arrival: int) -> Turn:
        return self._turns[arrival]

    def kin_of(self, sequence: Turn) -> _Kin:
        return self._kin_of[sequence]

    def head_behind(self, arrival: int) -> int | None:
        """Of the first of each kin, the one that came next."""
        at = bisect_right(self._heads, arrival)
        return self._heads[at] if at < len(self._heads) else None

    def regroup(self, kin: _Kin, depth: int) -> list[_Kin]:
        """Put its members to those that begin with the same `depth` blocks, or all they have."""
        joined: dict[_Kin, None] = {}
        for sequence in [self._turns[arrival] for arrival in kin.arrivals]:
            self._displace(sequence)
            joined[self._join(sequence, depth)] = None
        return list(joined)

    # ---- inside

    def _place(self, sequence: Turn) -> None:
        if sequence.aborted:
            self._aborted[sequence] = None
        elif sequence.lease is not None:
            self._begun[sequence] = None
        elif self._is_held(sequence):
            self._held[sequence] = None
        else:
            self._join(sequence, 1)

    def _displace(self, sequence: Turn) -> None:
        kin = self._kin_of.pop(sequence, None)
        if kin is None:
            for place in (self._begun, self._held, self._aborted):
                place.pop(sequence, None)
            return
        del self._turns[sequence.arrival]
        at = bisect_left(kin.arrivals, sequence.arrival)
        del kin.arrivals[at]
        if at == 0:
            del self._heads[bisect_left(self._heads, sequence.arrival)]
            if kin.arrivals:
                insort(self._heads, kin.arrivals[0])
            else:
                del self._kin[kin.key]

    def _join(self, sequence: Turn, depth: int) -> _Kin:
        """Blocks that end with the last token do not count: that token is always computed."""
        depth = min(depth, (len(sequence.token_ids) - 1) // self._block_size)
        key = sequence.oldest, depth, tuple(sequence.token_ids[: depth * self._block_size])
        kin = self._kin.get(key)
        if kin is None:
            kin = self._kin[key] = _Kin(key=key)
        if not kin.arrivals or sequence.arrival < kin.arrivals[0]:
            if kin.arrivals:
                del self._heads[bisect_left(self._heads, kin.arrivals[0])]
            insort(self._heads, sequence.arrival)
        insort(kin.arrivals, sequence.arrival)
        self._turns[sequence.arrival] = sequence
        self._kin_of[sequence] = kin
        return kin


class Walk:
    """Goes through those that may go on, in order of arrival, while they leave.

    Where one is passed over, so are its kin, unasked: who waits costs nothing. What was true of
    them may not be once something has left the cache; then they are asked again.
    """

    def __init__(
        self, waiting: Waiting, passes_over: Callable[[Turn], int], version: Callable[[], int]
    ) -> None:
        self.only_begun = False
        """Set it to meet nobody new from here on."""
        self._waiting, self._passes_over, self._version = waiting, passes_over, version
        self._at = -1
        self._next: list[int] = []
        """A heap: of each kin of which somebody was met, who may come next."""
        self._passed: list[_Kin] = []
        self._passed_in = version()

    def __iter__(self) -> Iterator[Turn]:
        for sequence in self._waiting.begun:
            yield from self._new(sequence.arrival)
            yield sequence
        yield from self._new(None)

    def _new(self, until: int | None) -> Iterator[Turn]:
        """Those that came before `until` and have not begun."""
        while not self.only_begun:
            arrival = self._following()
            if arrival is None or (until is not None and arrival > until):
                return
            sequence = self._waiting.turn(arrival)
            kin = self._waiting.kin_of(sequence)
            depth = self._passes_over(sequence)
            if depth and depth != kin.depth:
                self._go_on_with(self._waiting.regroup(kin, depth))
                continue
            self._at = arrival
            if depth:
                self._passed.append(kin)
            else:
                self._go_on_with([kin])
                yield sequence

    def _following(self) -> int | None:
        version = self._version()
        if version != self._passed_in:
            self._go_on_with(self._passed)
            self._passed, self._passed_in = [], version
        while self._next and self._next[0] <= self._at:
            heappop(self._next)
        head = self._waiting.head_behind(self._at)
        if head is None or (self._next and self._next[0] < head):
            return self._next[0] if self._next else None
        return head

    def _go_on_with(self, kin: Iterable[_Kin]) -> None:
        for one in kin:
            at = bisect_right(one.arrivals, self._at)
            if at < len(one.arrivals):
                heappush(self._next, one.arrivals[at])


_arrival = attrgetter("arrival")
