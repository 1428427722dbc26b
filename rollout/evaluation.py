"""How often a model solves its tasks, with intervals: greedy success, and pass@k of samples.

An episode that ended in an environment error counts as not solved, and is counted apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .summary import succeeded
from .trajectory import EndReason, Trajectory

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution: intervals hold 95 %."""
_RESAMPLES = 10_000
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A rate and its 95 % interval; no interval where nothing can be said about the spread."""

    rate: float
    low: float | None
    high: float | None


def wilson(successes: int, num: int) -> Estimate:
    """Success rate of `num` independent episodes, with the Wilson score interval.

    Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    if not 0 <= successes <= num or num == 0:
        raise ValueError(f"{successes} successes of {num} episodes")
    rate, z2 = successes / num, _Z * _Z / num
    centre = (rate + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(rate * (1 - rate) / num + z2 / (4 * num))
    low = centre - half if successes else 0.0
    high = centre + half if successes < num else 1.0
    return Estimate(rate=rate, low=low, high=high)


def pass_at_k(num: int, successes: int, k: int) -> float:
    """The chance that at least one of `k` samples solves a task, unbiased, from `num` samples.

    ``1 - C(num - successes, k) / C(num, k)``: Chen et al., Evaluating large language models trained
    on code (arXiv 2107.03374).
    """
    if not 1 <= k <= num or not 0 <= successes <= num:
        raise ValueError(f"pass@{k} of {successes} successes in {num} samples")
    return 1.0 - math.comb(num - successes, k) / math.comb(num, k)


def bootstrap(values: Sequence[float], *, seed: int) -> Estimate:
    """Mean over tasks, with the percentile interval of means of tasks drawn anew.

    One task says nothing about others: no interval.
    """
    if not values:
        raise ValueError("there are no tasks")
    each = np.asarray(values, np.float64)
    if len(each) == 1:
        return Estimate(rate=float(each[0]), low=None, high=None)
    rng = np.random.default_rng(seed)
    means = [each[rng.integers(len(each), size=len(each))].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(rate=float(each.mean()), low=float(low), high=float(high))


def evaluate(
    greedy: Sequence[Trajectory], sampled: Sequence[Trajectory], *, seed: int
) -> dict[str, dict[str, Any]]:
    """Environment -> figures as JSON values, and those of all together under "all".

    `sampled` has the same number of trajectories of every task of `greedy`. pass@k is given for the
    powers of two up to that number, and for the number itself. Names are sorted, "all" comes last;
    it is left out if there is one environment.
    """
    envs = sorted({one.env for one in greedy})
    rows = {
        env: _row(
            [one for one in greedy if one.env == env],
            [one for one in sampled if one.env == env],
            seed,
        )
        for env in envs
    }
    return rows if len(rows) == 1 else rows | {ALL: _row(greedy, sampled, seed)}


def _row(greedy: Sequence[Trajectory], sampled: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    solved: dict[str, list[bool]] = defaultdict(list)
    for one in sampled:
        solved[one.task_id].append(_solved(one))
    num = min(map(len, solved.values()))
    estimates = {}
    for k in _ks(num):
        each = [pass_at_k(len(some), sum(some), k) for _, some in sorted(solved.items())]
        estimates[str(k)] = asdict(bootstrap(each, seed=seed))
    successes = sum(map(_solved, greedy))
    return {
        "tasks": len(greedy),
        "greedy": {"successes": successes, **asdict(wilson(successes, len(greedy)))},
        "samples_per_task": num,
        "pass_at_k": estimates,
        "greedy_return_mean": float(np.mean([one.return_ for one in greedy])),
        "sampled_return_mean": float(np.mean([one.return_ for one in sampled])),
        "environment_errors": sum(map(_wrong, [*greedy, *sampled])),
    }


def _ks(num: int) -> list[int]:
    return sorted({*(1 << power for power in range(num.bit_length())), num})


def _wrong(trajectory: Trajectory) -> bool:
    return trajectory.end_reason is EndReason.ENVIRONMENT_ERROR


def _solved(trajectory: Trajectory) -> bool:
    return succeeded(trajectory) and not _wrong(trajectory)
