"""Who is told what a rollout does: progress files, TensorBoard, anybody's experiment tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .config import RolloutConfig
from .trajectory import Trajectory


class CallbackError(RuntimeError):
    """A callback raised. The rollout fails with it: results nobody recorded are no results."""


class Callback(Protocol):
    """Derive from it and write the methods you need; the others do nothing.

    All calls come one at a time, in the collector's thread, never on the thread of a rank process.
    Episodes wait meanwhile, so send slow work elsewhere. What a callback raises ends the rollout
    with a `CallbackError`.
    """

    def on_start(self, config: RolloutConfig) -> None:
        """Ranks and environments are ready."""

    def on_trajectory(self, trajectory: Trajectory) -> None:
        """A trajectory is finished and has its final rewards."""

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Every few seconds while tasks run, and once before the end.

        `elapsed_s` since the start; `trajectories` and `sampled_tokens` so far; `tokens_per_s`
        since the last call; `running`: environment -> episodes begun and not finished.
        """

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Always the last call, also when the rollout fails: then `completed` is false.

        Further keys: trajectories, sampled_tokens, return_mean, wall_s, cpu_s, exact.
        """
