"""report.json: an ablation in numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from interlace.rollout.checkup import num_usable_cores

from .arms import Arm
from .chunk_tuning import Tuning
from .comparison import Comparison, bulk_s, completion_s, cpu_s, tail_s
from .machine_load import LIMIT
from .request import Request
from .verdict import verdict

_MEDIANS = (
    *("coexisting_steps_share", "decode_gap_max", "prefill_gap_max", "alternations_per_step"),
    *("exchanges", "tickets", "control_bytes", "kv_bytes", "recomputed_tokens", "preemptions"),
    *("sampled_tokens", "prefill_tokens", "cached_tokens", "environment_errors"),
)
_SPREADS = {
    "decode_wait_s": ("p50", "p99", "max"),
    "first_token_s": ("p50", "p99"),
    "between_tokens_s": ("p50", "p99"),
}


def report(
    compared: Comparison,
    request: Request,
    *,
    description: Mapping[str, Any],
    tuning: Tuning | None,
    max_load: float = LIMIT,
) -> dict[str, Any]:
    """Everything that is known, as JSON values. `description`: the workload's own numbers."""
    found = verdict(compared)
    best = compared.best_of_same_sharding()
    subject, reference = compared.subject, compared.reference
    arms = {
        arm.name: arm_report(compared, arm)
        for arm, runs in compared.runs.items()
        if any(run.figures is not None for run in runs)
    }
    against_best = None
    if best is not None and subject is not None:
        against_best = {"arm": best.name, "ratio": arms[best.name]["subject_ratio"]}
    return {
        "verdict": found.text,
        "sound": found.sound,
        "request": request.as_json(),
        "workload": dict(description),
        "subject": subject.name if subject else None,
        "reference": reference.name if reference else None,
        "against_best_of_same_sharding": against_best,
        "digests": compared.digests,
        "arms": arms,
        "absent": dict(compared.absent),
        "failed": compared.failures,
        "chunk_tuning": None
        if tuning is None
        else {
            "completion_s": {str(chunk): s for chunk, s in sorted(tuning.completion_s.items())},
            "chosen": tuning.best,
        },
        "load": {
            "limit": max_load,
            "void_runs": compared.num_void,
            "how": "the kernel's one-minute load average without the runnable threads of the run "
            "itself (ranks, environments, launcher), averaged alike; of a run, its highest",
        },
        "machine": machine(),
    }


def arm_report(compared: Comparison, arm: Arm) -> dict[str, Any]:
    """One arm; lists have an entry for each run that counts, in the order of turns."""
    runs = [run for run in compared.runs[arm] if run.figures is not None]
    figures = compared.figures(arm)
    digests = sorted({str(run.figures["digest"]) for run in runs if run.figures is not None})
    reference = compared.reference
    ratios: dict[str, Any] = {}
    if reference is not None and reference is not arm and figures:
        for name, figure in (
            ("completion", completion_s),
            ("cpu", cpu_s),
            ("bulk", bulk_s),
            ("tail", tail_s),
        ):
            ratio = compared.ratio(arm, reference, figure)
            ratios[name] = ratio.as_json() if ratio else None
    subject, subject_ratio = compared.subject, None
    if subject is not None and subject is not arm and figures:
        subject_ratio = compared.ratio(subject, arm, completion_s)
    gained = compared.gain(arm) if figures else None
    return {
        "mode": arm.mode,
        "overrides": list(arm.overrides),
        "completion_s": [completion_s(one) for one in figures],
        "cpu_s": [cpu_s(one) for one in figures],
        "bulk_s": [bulk_s(one) for one in figures],
        "tail_s": [tail_s(one) for one in figures],
        "digest": digests[0] if len(digests) == 1 else None,
        "ratio_to_reference": ratios,
        "subject_ratio": subject_ratio.as_json() if subject_ratio else None,
        "gain": gained.as_json() if gained else None,
        **({} if not figures else _medians(figures)),
        "runs": [
            {
                "repeat": run.repeat,
                "completion_s": run.figures["completion_s"],
                "cpu_s": run.figures["cpu_s"],
                "digest": run.figures["digest"],
                "load": run.load,
                "void": run.void,
            }
            for run in runs
            if run.figures is not None
        ],
    }


def _medians(figures: list[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: median(one[name] for one in figures) for name in _MEDIANS}
    for name, keys in _SPREADS.items():
        found[name] = {key: _median_known(one[name][key] for one in figures) for key in keys}
    found["exact"] = all(one["exact"] for one in figures)
    found["transport"] = figures[0]["transport"]
    found["paths"] = figures[0]["paths"]
    found["ranks"] = {
        rank: {name: median(one["ranks"][rank].get(name, 0.0) for one in figures) for name in names}
        for rank, names in figures[0]["ranks"].items()
    }
    names = sorted({name for shares in found["ranks"].values() for name in shares})
    found["shares"] = {
        name: fmean(shares.get(name, 0.0) for shares in found["ranks"].values()) for name in names
    }
    return found


def _median_known(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "cpu": _cpu_name(),
        "cores": num_usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
