"""How much multiplexing could gain on a workload, and how much of that it gained.

p is the share of prefill in the time serial spends on either kind of work. s is what doing both
side by side costs: 1 if they do not disturb each other, 2 if nothing is won. Then no more than
min(p, 1 - p) * (2 - s) of serial's time can be saved. Both are measured: p from the time of
serial's steps, s from the steps of the other arm in which prefill and decode coexist, by what their
tickets take when alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from interlace.rollout.figures import DECODE, PREFILL

Phases = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Shares are of serial's completion time, 0 to 1; None where it cannot be told."""

    prefill_share: float | None
    """p"""
    slow_down: float | None
    """s"""
    bound: float | None
    """Most that could be saved."""
    saved: float
    """What was saved; negative if it took longer."""
    won_of_bound: float | None
    serial_idle: float
    """Share of their time that serial's ranks waited."""
    serial_parked: float
    """The part of it in which there was no work for anybody."""
    won_of_idle: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gain(serial: Mapping[str, Any], other: Mapping[str, Any], *, ratio: float) -> Gain:
    """From the figures of one run of each, and the ratio of their completion times."""
    share = prefill_share(serial["phases"])
    slow = slow_down(serial["phases"], other["phases"])
    bound = None
    if share is not None and slow is not None:
        bound = max(0.0, min(share, 1 - share) * (2 - slow))
    idle = mean_share(serial, "idle")
    saved = 1 - ratio
    return Gain(
        prefill_share=share,
        slow_down=slow,
        bound=bound,
        saved=saved,
        won_of_bound=saved / bound if bound else None,
        serial_idle=idle,
        serial_parked=mean_share(serial, "parked"),
        won_of_idle=saved / idle if idle else None,
    )


def prefill_share(serial: Phases) -> float | None:
    """p: prefill's share of the time of steps that do one or the other."""
    prefill, decode = (serial.get(name, {}).get("seconds", 0.0) for name in (PREFILL, DECODE))
    return prefill / (prefill + decode) if prefill + decode else None


def slow_down(serial: Phases, other: Phases) -> float | None:
    """s, from how long the steps of both would have taken with their tickets one after the other.

    None if nothing coexists, or serial has not done both.
    """
    both = other.get("both")
    if not both or not both["seconds"]:
        return None
    alone = {}
    for name in (PREFILL, DECODE):
        phase = serial.get(name)
        if not phase or not phase.get(name):
            return None
        alone[name] = both[name] * phase["seconds"] / phase[name]
    shorter = min(alone.values())
    return 2 - (sum(alone.values()) - both["seconds"]) / shorter if shorter else None


def mean_share(figures: Mapping[str, Any], name: str) -> float:
    """A share of time, a mean over ranks."""
    return fmean(rank.get(name, 0.0) for rank in figures["ranks"].values())
