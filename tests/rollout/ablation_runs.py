"""Runs of an ablation without runs: recorded orders over a slow link, measured as real ones are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from interlace.rollout.ablation.arms import Arm, parse_arms
from interlace.rollout.ablation.bench import Run
from interlace.rollout.ablation.comparison import Comparison
from interlace.rollout.ablation.measures import measure
from interlace.rollout.figures import figures

ORDERS = {
    "serial": ("(PPPP)", "DDDD", "DDDD"),
    "chunked": ("MMMM", "MMMM"),
    "whole_forward": ("(DDDDPPPP)", "DDDD"),
    "multiplexed": ("(DPDPDD", "DPDPDD)"),
    "disaggregated": ("(DPDPDD", "DPDPDD)"),
    "replicas": ("(DDDDPPPP)", "DDDD"),
}


def records_of(record_run: Callable[..., Any], mode: str, *, rounds: int, seed: int) -> Any:
    """Every step with a decode or a mixed batch gives trajectories 0 to 3 a token."""
    steps = list(ORDERS[mode]) * rounds
    records = record_run(steps, seed=seed, latency_s=1.5e-3)
    for rank, (own, _) in records.items():
        own[:] = [
            replace(step, sampled=(2 * rank, 2 * rank + 1)) if _samples(order) else step
            for step, order in zip(own, steps, strict=True)
        ]
    return records


def _samples(order: str) -> bool:
    return "D" in order or "M" in order


def figures_of(
    record_run: Callable[..., Any], mode: str, *, rounds: int = 20, seed: int = 0
) -> dict[str, Any]:
    """What a child would have kept."""
    records = records_of(record_run, mode, rounds=rounds, seed=seed)
    began = min(steps[0].began_at for steps, _ in records.values()) - 0.01
    ended = max(steps[-1].ended_at for steps, _ in records.values())
    asked = [(trajectory, began) for trajectory in range(4)]
    shared = figures(records)
    measured = measure(records, asked, [began + 0.8 * (ended - began), ended], began_at=began)
    return {
        "completion_s": ended - began,
        "cpu_s": 1.6 * (ended - began),
        "digest": "d" * 64,
        "exact": True,
        "transport": {"kind": "window", "why": "all ranks are on one host"},
        "coexisting_steps_share": shared.coexisting_steps_share,
        "decode_gap_max": shared.decode_gap_max,
        "prefill_gap_max": shared.prefill_gap_max,
        "alternations_per_step": shared.alternations_per_step,
        "decode_wait_s": {"p50": 0.002, "p99": 0.013, "max": 0.02},
        "preemptions": 0,
        "trajectories": 4,
        "turns": 4,
        "sampled_tokens": 400,
        "prefill_tokens": 4000,
        "cached_tokens": 100,
        "environment_errors": 0,
        "paths": sorted({t.path for _, own in records.values() for t in own}),
        **measured,
    }


def compared(
    found: Mapping[str, Sequence[dict[str, Any]]],
    *,
    absent: Mapping[str, str] | None = None,
    loads: Mapping[tuple[str, int], float] | None = None,
) -> Comparison:
    """`found`: arm -> the figures of its runs; a load over 3 makes one void."""
    runs: dict[Arm, list[Run]] = {}
    for name, each in found.items():
        (arm,) = parse_arms(name, world=2)
        runs[arm] = [
            Run(arm=arm, repeat=number, figures=one, load=load, void=load > 3)
            for number, one in enumerate(each)
            for load in [(loads or {}).get((name, number), 0.5)]
        ]
    return Comparison(runs=runs, absent=absent or {})
