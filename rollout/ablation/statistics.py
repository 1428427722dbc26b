"""Comparing runs that were made in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_NUM_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Median of the ratios of neighbouring runs, and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def holds_one(self) -> bool:
        """Whether the pairs could be equal."""
        return self.low <= 1 <= self.high

    @property
    def words(self) -> str:
        return ratio_words(self.as_json())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percent(share: float, digits: int = 0) -> str:
    """A share in words."""
    return f"{100 * share:.{digits}f} %"


def ratio_words(ratio: Mapping[str, Any] | None) -> str:
    """A ratio with its interval, where there is more than one pair."""
    if ratio is None:
        return "-"
    interval = f" [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio["pairs"] > 1 else ""
    return f"{ratio['median']:.3f}{interval}"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> PairedRatio | None:
    """`over` by `under`, run by run, with a percentile bootstrap of the median.

    None where there is no pair or `under` has zeros. One pair is an interval of no width: it says
    nothing about the next. ValueError unless both have the same length.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} runs cannot be paired with {len(under)}")
    if not under or not all(under):
        return None
    ratios = np.array(over, np.float64) / np.array(under, np.float64)
    draws = np.random.default_rng(0).choice(ratios, (_NUM_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975]).tolist()
    return PairedRatio(median=float(np.median(ratios)), low=low, high=high, pairs=len(ratios))
