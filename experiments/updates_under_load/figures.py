"""What a run has come to, in words."""

from __future__ import annotations

import numpy as np

from interlace.experiments.updates_under_load.memory import growth
from interlace.experiments.updates_under_load.updater import MODES, Course
from interlace.rollout import Rollout


def measured(course: Course, tokens: dict[int, int], compared: int) -> dict[str, str]:
    """The figures, in words."""
    reports = course.reports
    each = [tokens.get(version, 0) for version in course.weights_of]
    return {
        "updates": ", ".join(
            f"{sum(r.mode == mode for r in reports)} {mode}" for mode in (*MODES, "same")
        ),
        "ended in the middle": ", ".join(f"{n} {kind}" for kind, n in course.crashes.items()),
        "update time": times([r.total_s for r in reports]),
        "  of which staged while tokens are sampled": times([r.stage_s for r in reports]),
        "rank stands still to install": times([r.stall_s for r in reports]),
        "bytes of a version, kept by each rank": f"{max(r.num_bytes for r in reports)}, "
        f"{max(r.rank_bytes for r in reports)}",
        "tokens": f"{sum(each)} of {len(each)} versions, "
        f"{np.median(each):.0f} of each (median), {sum(n > 0 for n in each)} versions with any",
        "tokens to compute again": str(sum(r.dropped_tokens for r in reports)),
        "turns ended": str(sum(len(r.aborted) for r in reports)),
        "tokens recomputed on one rank, bit-equal": str(compared),
        "memory of each rank, growth (MiB)": ", ".join(
            f"{samples[-1]:.0f}, {growth(samples[len(samples) // 5 :]):+.1f}"
            for samples in course.memory_mib.values()
        ),
    }


def step_times(rollout: Rollout, course: Course) -> dict[str, str]:
    """How long steps took in which somebody decoded, by the journal of rank 0."""
    begins, ends = np.array(course.spans).T
    during: list[float] = []
    otherwise: list[float] = []
    for step in rollout.records[0][0]:
        if step.decoding:
            met = (begins < step.ended_at) & (ends > step.began_at)
            (during if met.any() else otherwise).append(step.ended_at - step.began_at)
    return {
        "a step of the ranks, no update": times(otherwise),
        "a step of the ranks, update under way": times(during),
    }


def times(seconds: list[float]) -> str:
    """Mean, median, 99th percentile and maximum in milliseconds."""
    if not seconds:
        return "none"
    ms = np.array(seconds) * 1e3
    return (
        f"mean {ms.mean():.2f} ms, p50 {np.median(ms):.2f}, p99 {np.quantile(ms, 0.99):.2f}, "
        f"max {ms.max():.2f}"
    )
