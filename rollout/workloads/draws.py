"""Numbers drawn by place: the same ones for the same place, on every machine.

Only raw bits of a counter-based generator (Philox) are used, whose stream numpy guarantees; what is
made of them is arithmetic that is written here.
"""

from __future__ import annotations

from enum import IntEnum
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


class Purpose(IntEnum):
    """What a stream is for: a field drawn differently shifts no other."""

    TEXT = 0
    PROMPT = 1
    TURNS = 2
    GENERATE = 3
    APPEND = 4
    LATENCY = 5
    EXTRA_LATENCY = 6
    RESET = 7
    FAULT = 8


class Draws:
    """The numbers of one trajectory: `group` and, from 1 on, `member`; member 0 is the group's."""

    def __init__(self, seed: int, part: int, group: int, member: int) -> None:
        self.group = group
        self._key, self._member = (seed, part), member

    def integer(self, purpose: Purpose) -> int:
        """One whole number of 52 bits."""
        return int(self._raw(purpose, 1)[0])

    def uniforms(self, purpose: Purpose, num: int) -> list[float]:
        """`num` numbers between 0 and 1, neither included; more of them begin with fewer."""
        return [(int(raw) + 0.5) * 2.0**-52 for raw in self._raw(purpose, num)]

    def _raw(self, purpose: Purpose, num: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        counter = np.array([0, purpose, self._member, self.group], np.uint64)
        bits = np.random.Philox(key=np.array(self._key, np.uint64), counter=counter)
        raw = np.asarray(bits.random_raw(num), np.uint64)
        return raw >> np.uint64(12)


def correlated(shared: float, own: float, correlation: float) -> float:
    """A uniform number made of a group's and a member's.

    Over many groups, the normal scores of two members have this correlation.
    """
    if not correlation:
        return own
    score = correlation**0.5 * _NORMAL.inv_cdf(shared)
    score += (1 - correlation) ** 0.5 * _NORMAL.inv_cdf(own)
    return min(max(_NORMAL.cdf(score), 2.0**-53), 1 - 2.0**-53)
