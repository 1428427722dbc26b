"""peers.json: a comparison in numbers, and the table on screen."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.comparison import completion_s, cpu_s
from interlace.rollout.ablation.report import machine
from interlace.rollout.ablation.statistics import ratio_words

from .block_size import Tried, size_words
from .comparison import RATES, PeerComparison
from .contestants import INTERLACE, PEERS, family_of, version_of
from .request import PeersRequest

HEADINGS = ("engine", "completion", "CPU", "prefill", "decode", "equal tokens", "load of others")
"""Rates are tokens a second, one for each batch size."""


def report(
    compared: PeerComparison,
    request: PeersRequest,
    *,
    block_sizes: Tried,
    max_load: float,
) -> dict[str, Any]:
    """Everything that is known, as JSON values. `block_sizes`: of vLLM, with what came of each."""
    best = {family: compared.best(family) for family in (INTERLACE, *PEERS)}
    return {
        "sound": sound(compared),
        "ratios": compared.completion_ratios,
        "cpu_ratios": compared.cpu_ratios,
        "rate_ratios": {peer: ratios for peer in PEERS if (ratios := compared.rate_ratios(peer))},
        "best": {family: arm.name if arm else None for family, arm in best.items()},
        "arms": {arm.name: _arm(compared, arm, request) for arm in compared.arms},
        "absent": dict(compared.absent),
        "failed": compared.failed,
        "interlace_gives_one_set_of_tokens": compared.interlace_is_one,
        "vllm_block_sizes": dict(block_sizes),
        "request": request.as_json(),
        "load": {
            "limit": max_load,
            "void_runs": compared.num_void,
            "how": "cores that processes which are no part of the run kept busy, and other guests "
            "of the host: of a run, the most over ten seconds",
        },
        "machine": machine(),
    }


def sound(compared: PeerComparison) -> bool:
    """Whether Interlace, if it takes part, played and gave the same tokens in every run, and nobody
    who takes part failed."""
    takes_part = any(family_of(arm) == INTERLACE for arm in compared.runs)
    played = compared.best(INTERLACE) is not None and bool(compared.interlace_is_one)
    return (played or not takes_part) and not compared.failed


def _arm(compared: PeerComparison, arm: Arm, request: PeersRequest) -> dict[str, Any]:
    """One arm; lists have an entry for each run that counts, in the order of turns."""
    figures = compared.figures(arm)
    family = family_of(arm)
    return {
        "engine": family,
        "version": version_of(request.installed, family),
        "overrides": list(arm.overrides),
        "kernels": figures[0].get("kernels"),
        "completion_s": [completion_s(one) for one in figures],
        "cpu_s": [cpu_s(one) for one in figures],
        **compared.rates(arm),
        "num_tokens": figures[0]["num_tokens"],
        "equal_tokens": compared.equal_tokens(arm),
        "runs": [
            {
                "repeat": run.repeat,
                "completion_s": run.figures["completion_s"],
                "cpu_s": run.figures["cpu_s"],
                **{name: run.figures[name] for name in RATES},
                "load": run.load,
                "void": run.void,
            }
            for run in compared.runs[arm]
            if run.figures is not None
        ],
    }


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One an arm with runs that count, cells in the order of `HEADINGS`."""
    table = []
    for arm_name, arm in found["arms"].items():
        equal = arm["equal_tokens"]
        table.append(
            (
                arm_name,
                f"{median(arm['completion_s']):.2f} s",
                f"{median(arm['cpu_s']):.1f} s",
                *(" / ".join(_rate(one) for one in arm[name].values()) for name in RATES),
                f"{equal['equal']:,} of {equal['of']:,}" if equal else "-",
                f"{max(run['load'] for run in arm['runs'] if not run['void']):.2f}",
            )
        )
    return table


def which(found: Mapping[str, Any]) -> str:
    """Which comparison it is, for the table and the picture."""
    if found["request"]["tiles"]:
        return "all engines with all that the processor has"
    return "all engines without matrix tiles"


def notes(found: Mapping[str, Any]) -> list[str]:
    """What came out, and what a reader should know, a line each."""
    lines = [
        f"{name}: {ratio_words(ratio)} of the time, {ratio_words(found['cpu_ratios'][name])} of "
        "the CPU time"
        for name, ratio in found["ratios"].items()
        if ratio
    ]
    lines += [f"absent: {name}: {why}" for name, why in found["absent"].items()]
    lines += [f"failed: {name}: {why}" for name, why in found["failed"].items()]
    if tried := found["vllm_block_sizes"]:
        told = ", ".join(f"{size}: {size_words(one)}" for size, one in tried.items())
        lines.append(f"block sizes of vLLM, of which the soonest is used: {told}")
    if found["interlace_gives_one_set_of_tokens"] is False:
        lines.append("INTERLACE'S RUNS GAVE DIFFERENT TOKENS: nothing else counts")
    if num := found["load"]["void_runs"]:
        lines.append(
            f"{num} runs are void and not counted: others kept more than "
            f"{found['load']['limit']:g} cores busy; the same command makes them again"
        )
    pairs = [ratio["pairs"] for ratio in found["ratios"].values() if ratio]
    if pairs and min(pairs) < 5:
        lines.append(f"intervals come from as few as {min(pairs)} pairs: 5 or more make them 95 %")
    return lines


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
