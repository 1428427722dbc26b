"""All runs of an ablation, arm by arm and pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from .arms import SAME_SHARDING, Arm
from .bench import Run
from .gain import Gain, gain
from .statistics import PairedRatio, paired_ratio

Figure = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms in the order they were asked for, and why others are not there."""

    runs: Mapping[Arm, Sequence[Run]]
    absent: Mapping[str, str]

    @property
    def arms(self) -> list[Arm]:
        """Those with a run that counts."""
        return [arm for arm, runs in self.runs.items() if any(run.counts for run in runs)]

    @property
    def reference(self) -> Arm | None:
        """What the others are compared with: serial or, without it, the first arm that counts."""
        serial = [arm for arm in self.arms if arm.mode == "serial"]
        return next(iter(serial or self.arms), None)

    @property
    def subject(self) -> Arm | None:
        """What the verdict is about: multiplexed, else the first arm of another order of steps than
        the reference, else the first other arm."""
        reference = self.reference
        others = [arm for arm in self.arms if arm is not reference]
        plain = [a for a in others if a.mode == "multiplexed" and not a.ordered_to_compare]
        if reference is not None and reference.mode == "multiplexed":
            plain = [arm for arm in others if arm.policy != reference.policy]
        return next(iter(plain or others), None)

    @property
    def digests(self) -> dict[str, list[str]]:
        """Digest -> the arms that have it; void runs have one too."""
        found: dict[str, list[str]] = {}
        for arm, runs in self.runs.items():
            for run in runs:
                if run.figures is not None:
                    arms = found.setdefault(str(run.figures["digest"]), [])
                    if arm.name not in arms:
                        arms.append(arm.name)
        return found

    @property
    def failures(self) -> dict[str, str]:
        """Arm -> the error of its first run that failed."""
        return {
            arm.name: next(run.error for run in runs if run.error)
            for arm, runs in self.runs.items()
            if any(run.error for run in runs)
        }

    @property
    def num_void(self) -> int:
        return sum(run.void for runs in self.runs.values() for run in runs)

    def figures(self, arm: Arm) -> list[Mapping[str, Any]]:
        """Of the runs that count."""
        return [run.figures for run in self.runs[arm] if run.counts and run.figures is not None]

    def column(self, arm: Arm, figure: Figure) -> list[float]:
        return [figure(one) for one in self.figures(arm)]

    def pairs(self, over: Arm, under: Arm) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Runs of one turn, where both count."""
        known = {run.repeat: run.figures for run in self.runs[under] if run.counts}
        return [
            (run.figures, known_figures)
            for run in self.runs[over]
            if run.counts
            and run.figures is not None
            and (known_figures := known.get(run.repeat)) is not None
        ]

    def ratio(self, over: Arm, under: Arm, figure: Figure) -> PairedRatio | None:
        pairs = self.pairs(over, under)
        return paired_ratio([figure(a) for a, _ in pairs], [figure(b) for _, b in pairs])

    def best_of_same_sharding(self) -> Arm | None:
        """The soonest of those that spread the model as the subject does; not the subject."""
        subject = self.subject
        others = [
            arm
            for arm in self.arms
            if arm is not subject and arm.mode in SAME_SHARDING and not arm.ordered_to_compare
        ]
        return min(others, key=lambda arm: median(self.column(arm, completion_s)), default=None)

    def gain(self, arm: Arm) -> Gain | None:
        """Medians over the pairs with serial; None without any, or of serial itself."""
        serial = self.reference
        if serial is None or serial.mode != "serial" or arm is serial:
            return None
        each = [
            gain(under, over, ratio=completion_s(over) / completion_s(under))
            for over, under in self.pairs(arm, serial)
        ]
        return _median(each) if each else None


def completion_s(figures: Mapping[str, Any]) -> float:
    return float(figures["completion_s"])


def cpu_s(figures: Mapping[str, Any]) -> float:
    return float(figures["cpu_s"])


def bulk_s(figures: Mapping[str, Any]) -> float:
    return float(figures["tail"]["bulk_s"])


def tail_s(figures: Mapping[str, Any]) -> float:
    return float(figures["tail"]["tail_s"])


def _median(gains: Sequence[Gain]) -> Gain:
    values: dict[str, Any] = {}
    for field in fields(Gain):
        known = [value for one in gains if (value := getattr(one, field.name)) is not None]
        values[field.name] = median(known) if known else None
    return Gain(**values)
