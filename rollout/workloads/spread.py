"""How a length or a time is spread: a distribution in the words of a workload file."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from pydantic import Field, model_validator

from interlace.rollout.config import Section

_NORMAL = NormalDist()
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_KINDS = (("value",), ("low", "high"), ("mean", "sigma"), tuple(_QUANTILES))


class Spread(Section):
    """A number, or a table: value; low and high; mean and sigma; or p50 and other quantiles.

    low and high: uniform. mean and sigma: normal. Quantiles: log-normal through p50 and one other
    of p90, p95, p99; with more of them the logarithm is a straight line between neighbours.
    """

    value: float | None = Field(default=None, description="Always this.")
    low: float | None = Field(default=None, description="Uniform from here ...")
    high: float | None = Field(default=None, description="... to here.")
    mean: float | None = Field(default=None, description="Mean of a normal distribution.")
    sigma: float | None = Field(default=None, ge=0, description="Its standard deviation.")
    p50: float | None = Field(default=None, gt=0, description="Median of a log-normal one.")
    p90: float | None = Field(default=None, gt=0, description="Below it are 90 %.")
    p95: float | None = Field(default=None, gt=0, description="Below it are 95 %.")
    p99: float | None = Field(default=None, gt=0, description="Below it are 99 %.")
    min: float = Field(default=0.0, ge=0, description="What is smaller becomes this.")
    cap: float | None = Field(default=None, gt=0, description="What is larger becomes this.")
    rare_share: float = Field(default=0.0, ge=0, lt=1, description="In this share of the draws ...")
    rare_value: float | None = Field(default=None, ge=0, description="... it is this instead.")

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_a_value(cls, given: Any) -> Any:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        return {"value": given} if number else given

    @model_validator(mode="after")
    def _is_one_distribution(self) -> Spread:
        kinds = [kind for kind in _KINDS if any(getattr(self, key) is not None for key in kind)]
        if len(kinds) != 1:
            found = " and ".join("/".join(kind) for kind in kinds) or "none of them"
            raise ValueError(
                "give one of value; low and high; mean and sigma; p50 and p90, p95 or p99: "
                f"found {found}"
            )
        (kind,) = kinds
        given = [key for key in kind if getattr(self, key) is not None]
        if kind == tuple(_QUANTILES):
            if self.p50 is None or len(given) < 2:
                raise ValueError(f"quantiles are p50 and at least one other, found {given[0]}")
            for below, above in pairwise(given):
                if getattr(self, below) > getattr(self, above):
                    raise ValueError(
                        f"{below} = {getattr(self, below):g} is above "
                        f"{above} = {getattr(self, above):g}"
                    )
        elif len(given) < len(kind):
            raise ValueError(f"{given[0]} is given without {(set(kind) - set(given)).pop()}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        if self.cap is not None and self.cap < self.min:
            raise ValueError(f"cap = {self.cap:g} is below min = {self.min:g}")
        if bool(self.rare_share) != (self.rare_value is not None):
            raise ValueError("rare_share and rare_value belong together: give both or none")
        return self

    def quantile(self, u: float) -> float:
        """The value below which a share `u` (0 < u < 1) of the draws lies."""
        usual = 1 - self.rare_share
        if u >= usual and self.rare_value is not None:
            return self.rare_value
        value = self._usual(u / usual)
        return min(max(value, self.min), math.inf if self.cap is None else self.cap)

    def _usual(self, u: float) -> float:
        if self.value is not None:
            return self.value
        if self.low is not None and self.high is not None:
            return self.low + (self.high - self.low) * u
        z = _NORMAL.inv_cdf(u)
        if self.mean is not None and self.sigma is not None:
            return self.mean + self.sigma * z
        points = [
            (_NORMAL.inv_cdf(share), math.log(getattr(self, key)))
            for key, share in _QUANTILES.items()
            if getattr(self, key) is not None
        ]
        later = [pair for pair in pairwise(points) if z <= pair[1][0]]
        (z0, log0), (z1, log1) = later[0] if later else (points[-2], points[-1])
        return math.exp(log0 + (log1 - log0) * (z - z0) / (z1 - z0))
