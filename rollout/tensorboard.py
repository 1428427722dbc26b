"""A rollout's numbers as TensorBoard curves (`pip install 'interlace[tensorboard]'`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .callbacks import Callback
from .config import ConfigError, RolloutConfig
from .metrics_file import trajectory_line
from .trajectory import Trajectory


class TensorBoard(Callback):
    """Per environment the return, success, turns and tokens of each trajectory, over how many
    are finished; speed and running episodes over seconds since the start."""

    def __init__(self, folder: Path) -> None:
        """ConfigError if the package is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--tensorboard needs the package tensorboard: pip install 'interlace[tensorboard]'"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._finished = 0

    def on_start(self, config: RolloutConfig) -> None:
        self._writer = self._make(str(self._folder))
        self._writer.add_text("config", f"```json\n{config.model_dump_json(indent=2)}\n```")

    def on_trajectory(self, trajectory: Trajectory) -> None:
        self._finished += 1
        line = trajectory_line(trajectory)
        for name in ("return", "success", "turns", "sampled_tokens", "logprob_mean"):
            if line[name] is not None:
                self._writer.add_scalar(f"{name}/{trajectory.env}", line[name], self._finished)

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        second = round(metrics["elapsed_s"])
        for name in ("trajectories", "sampled_tokens", "tokens_per_s"):
            if metrics[name] is not None:
                self._writer.add_scalar(f"rollout/{name}", metrics[name], second)
        for env, num in metrics["running"].items():
            self._writer.add_scalar(f"running/{env}", num, second)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
