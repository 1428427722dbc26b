"""All runs of a comparison side by side: who counts, who is best, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.bench import Run
from interlace.rollout.ablation.comparison import completion_s, cpu_s
from interlace.rollout.ablation.statistics import PairedRatio, paired_ratio

from .contestants import INTERLACE, PEERS, family_of
from .played import equal_tokens

Figures = Mapping[str, Any]
Figure = Callable[[Figures], float]
RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")
_RATIO_NAMES = {"vllm": "best_vllm", "transformers": "transformers", "llama-cpp": "llama_cpp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """Runs of every arm, one a turn."""

    runs: Mapping[Arm, Sequence[Run]]
    absent: Mapping[str, str]
    """Engine -> why it takes no part."""

    @property
    def arms(self) -> list[Arm]:
        """Those with runs that count."""
        return [arm for arm in self.runs if self.figures(arm)]

    @property
    def failed(self) -> dict[str, str]:
        """Arm -> its last error, of those without a run that ended."""
        return {
            arm.name: runs[-1].error or "unknown"
            for arm, runs in self.runs.items()
            if runs and all(run.figures is None for run in runs)
        }

    @property
    def num_void(self) -> int:
        return sum(run.void for runs in self.runs.values() for run in runs)

    def figures(self, arm: Arm) -> list[Figures]:
        """Of the runs that count, in the order of turns."""
        return [run.figures for run in self.runs[arm] if run.counts and run.figures is not None]

    def median(self, arm: Arm, figure: Figure) -> float:
        return median(figure(one) for one in self.figures(arm))

    def best(self, family: str) -> Arm | None:
        """The soonest way to run an engine; None if no run of it counts."""
        ways = [arm for arm in self.arms if family_of(arm) == family]
        return min(ways, key=lambda arm: self.median(arm, completion_s), default=None)

    def ratio(self, over: Arm, under: Arm, figure: Figure) -> PairedRatio | None:
        """Of runs of one turn, where both count."""
        known = {run.repeat: run.figures for run in self.runs[under] if run.counts}
        pairs = [
            (run.figures, other)
            for run in self.runs[over]
            if run.counts
            and run.figures is not None
            and (other := known.get(run.repeat)) is not None
        ]
        return paired_ratio([figure(a) for a, _ in pairs], [figure(b) for _, b in pairs])

    def ratios(self, figure: Figure) -> dict[str, Any]:
        """Interlace's best mode over the best of each peer that is there, and multiplexed over
        serial; None where no two runs of one turn count."""
        own = self.best(INTERLACE)
        pairs = {
            f"exact_vs_{_RATIO_NAMES[peer]}": (own, self.best(peer))
            for peer in PEERS
            if any(family_of(arm) == peer for arm in self.runs)
        }
        modes = {arm.name: arm for arm in self.arms}
        pairs["multiplexed_vs_serial"] = (
            modes.get("interlace-multiplexed"),
            modes.get("interlace-serial"),
        )
        return {name: self._ratio_json(pair, figure) for name, pair in pairs.items()}

    @property
    def completion_ratios(self) -> dict[str, Any]:
        return self.ratios(completion_s)

    @property
    def cpu_ratios(self) -> dict[str, Any]:
        return self.ratios(cpu_s)

    def rates(self, arm: Arm) -> dict[str, dict[str, float | None]]:
        """Medians over the runs, by batch size."""
        figures = self.figures(arm)
        return {
            name: {
                batch: _median_known([one[name][batch] for one in figures])
                for batch in figures[0][name]
            }
            for name in RATES
        }

    def rate_ratios(self, peer: str) -> dict[str, dict[str, float | None]]:
        """Rates of Interlace's best mode over those of a peer, in whichever way it is fastest at
        that; None where a rate is not known. Above 1 Interlace is ahead."""
        own = self.best(INTERLACE)
        ours = None if own is None else self.rates(own)
        theirs = [self.rates(arm) for arm in self.arms if family_of(arm) == peer]
        if ours is None or not theirs:
            return {}
        return {
            name: {
                batch: _over(rate, _most([one[name][batch] for one in theirs]))
                for batch, rate in by_batch.items()
            }
            for name, by_batch in ours.items()
        }

    def equal_tokens(self, arm: Arm) -> dict[str, Any] | None:
        """How many tokens of its first run are those of Interlace's best mode; None without."""
        own = self.best(INTERLACE)
        if own is None:
            return None
        first, other = self.figures(own)[0], self.figures(arm)[0]
        return {"of": first["num_tokens"], **equal_tokens(first["tokens"], other["tokens"])}

    @property
    def interlace_is_one(self) -> bool | None:
        """Whether every run of Interlace, in every mode, gave the same tokens; None without."""
        own = [arm for arm in self.runs if family_of(arm) == INTERLACE]
        said = [
            run.figures["tokens"]
            for arm in own
            for run in self.runs[arm]
            if run.figures is not None
        ]
        return all(one == said[0] for one in said) if said else None

    def _ratio_json(
        self, pair: tuple[Arm | None, Arm | None], figure: Figure
    ) -> dict[str, Any] | None:
        over, under = pair
        if over is None or under is None:
            return None
        ratio = self.ratio(over, under, figure)
        return ratio.as_json() if ratio else None


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
