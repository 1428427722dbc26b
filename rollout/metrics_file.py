"""metrics.jsonl: what a rollout did while it ran, one JSON object a line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .callbacks import Callback
from .config import RolloutConfig
from .summary import succeeded
from .trajectory import Trajectory


class MetricsFile(Callback):
    """Each line has `kind`: trajectory, metrics or end, and is on disk as soon as it is true."""

    def __init__(self, path: Path) -> None:
        """The file is made, or emptied, when the rollout starts."""
        self._path = path
        self._file: TextIO | None = None
        self._began_at = 0.0

    def on_start(self, config: RolloutConfig) -> None:
        self._file = self._path.open("w", encoding="utf-8", buffering=1)
        self._began_at = time.monotonic()

    def on_trajectory(self, trajectory: Trajectory) -> None:
        self._write("trajectory", trajectory_line(trajectory))

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._write("metrics", metrics)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._write("end", summary)
            self._file.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        assert self._file is not None
        line = {"kind": kind, "elapsed_s": time.monotonic() - self._began_at, **values}
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")


def trajectory_line(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory in a few numbers, as JSON values."""
    logprobs = trajectory.logprob[trajectory.loss_mask]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "env": trajectory.env,
        "return": trajectory.return_,
        "success": succeeded(trajectory),
        "end_reason": trajectory.end_reason.value,
        "turns": trajectory.num_turns,
        "tokens": trajectory.num_tokens,
        "sampled_tokens": trajectory.sampled_tokens,
        "prefill_tokens": sum(turn.prefill_tokens for turn in trajectory.turns),
        "cached_tokens": sum(turn.cached_tokens for turn in trajectory.turns),
        "logprob_mean": float(np.mean(logprobs, dtype=np.float64)) if len(logprobs) else None,
    }
