"""The numbers of trajectories. Noise is drawn from them, so one that is resumed keeps its own."""

from __future__ import annotations

from collections.abc import Sequence


class TrajectoryIds:
    """Numbers from 0 on, one a trajectory; that of an unfinished one can be claimed again."""

    def __init__(self) -> None:
        self._next = 0
        self._unfinished: set[int] = set()
        """Given out below `_next` and free to be claimed."""
        self._skipped: list[range] = []
        """Below `_next` and never given out."""

    def new(self, num: int) -> range:
        """The next so many."""
        given = range(self._next, self._next + num)
        self._next += num
        return given

    def give_back(self, trajectory_id: int) -> None:
        """Its trajectory ended unfinished: it may be claimed, once."""
        self._unfinished.add(trajectory_id)

    def claim(self, ids: Sequence[int]) -> None:
        """Take the numbers of trajectories that go on. ValueError, and nothing is taken, if one
        occurs twice, is being played or was finished; one that was never given out is free."""
        for at, number in enumerate(ids):
            if number in ids[:at]:
                raise ValueError(f"trajectory {number} is given twice to be resumed")
            if number < self._next and number not in self._unfinished and not self._gap(number):
                raise ValueError(
                    f"trajectory {number} cannot be resumed: it is being played, or has been "
                    "finished or resumed already, or another one has its number here"
                )
        for number in ids:
            if number >= self._next:
                self._skip(range(self._next, number))
                self._next = number + 1
            elif number in self._unfinished:
                self._unfinished.remove(number)
            else:
                gap = self._gap(number)
                self._skipped.remove(gap)
                self._skip(range(gap.start, number))
                self._skip(range(number + 1, gap.stop))

    def _gap(self, number: int) -> range:
        return next((gap for gap in self._skipped if number in gap), range(0))

    def _skip(self, numbers: range) -> None:
        if numbers:
            self._skipped.append(numbers)
