"""One run of one arm, as a process of its own: ``python -m interlace.rollout.ablation.child``.

Reads `request.json` of the folder it is given and leaves `run.json` there, last of all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from interlace.envs.lifeline import die_with_parent
from interlace.rollout.callbacks import Callback
from interlace.rollout.commands.collect import collect
from interlace.rollout.config_file import load_config
from interlace.rollout.figures import PREFILL
from interlace.rollout.metrics_file import MetricsFile
from interlace.rollout.output_folder import OutputFolder
from interlace.rollout.summary import summarise, write_summary
from interlace.rollout.timeline import draw_timeline
from interlace.rollout.trace import write_trace
from interlace.rollout.trajectory import EndReason, Trajectory

from .arms import Arm
from .measures import measure
from .request import Request

REQUEST, RESULT, LOG = "request.json", "run.json", "log.txt"


class _Finishes(Callback):
    """When the run began, and when each trajectory was finished, by the clock of the records."""

    def __init__(self) -> None:
        self.began_at, self.at = 0.0, list[float]()

    def on_start(self, config: Any) -> None:
        self.began_at = time.monotonic()

    def on_trajectory(self, trajectory: Trajectory) -> None:
        self.at.append(time.monotonic())

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        return None


def run(folder: Path) -> dict[str, Any]:
    """Play the workload; what came of it, as JSON values."""
    asked = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    request, output = Request.from_json(asked["request"]), OutputFolder(folder)
    arm = Arm(name=asked["arm"], overrides=tuple(asked["overrides"]))
    workload = request.load()
    config = load_config(overrides=[*workload.overrides, *request.overrides, *arm.overrides])
    output.config.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    finishes = _Finishes()
    rollout, trajectories = collect(
        config,
        list(workload.tasks),
        output,
        Console(highlight=False, soft_wrap=True),
        [MetricsFile(output.metrics), finishes],
    )
    summary = summarise(
        trajectories,
        rollout.records,
        mode=config.mode,
        layout={name: getattr(config.layout, name) for name in ("world", "dp", "tp", "ep")},
        wall_s=rollout.wall_s,
        cpu_s=rollout.cpu_s,
        exact=rollout.exact,
        transport=rollout.transport,
    )
    write_summary(output.summary, summary)
    measured = measure(
        rollout.records,
        rollout.asked,
        finishes.at,
        began_at=finishes.began_at,
        policy=arm.policy,
    )
    if asked["pictures"]:
        draw_timeline(output.timeline, rollout.records, mode=arm.name)
        write_trace(output.trace, rollout.records)
    errors = sum(t.end_reason is EndReason.ENVIRONMENT_ERROR for t in trajectories)
    kept = (
        *("digest", "exact", "outside_digest", "transport", "coexisting_steps_share"),
        *("decode_gap_max", "prefill_gap_max", "decode_wait_s", "alternations_per_step"),
        *("preemptions", "trajectories", "turns", "sampled_tokens", "prefill_tokens"),
        *("cached_tokens",),
    )
    return {
        "completion_s": rollout.wall_s,
        "cpu_s": rollout.cpu_s,
        **{name: summary[name] for name in kept},
        "environment_errors": errors,
        "paths": sorted({t.path for _, own in rollout.records.values() for t in own} or {PREFILL}),
        **measured,
    }


def run_for_parent(run: Callable[[Path], dict[str, Any]]) -> None:
    """As a process of its own, given its folder and the process to die with: exit code 0 and a
    `run.json` of what `run` found, or a traceback in the log."""
    # In the background of a script it would be ignored, and this would live on without its parent.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(int(sys.argv[2]), signal.SIGINT)
    folder = Path(sys.argv[1])
    found = run(folder)
    partial = folder / f"{RESULT}.partial"
    partial.write_text(json.dumps(found, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, folder / RESULT)


if __name__ == "__main__":
    run_for_parent(run)
