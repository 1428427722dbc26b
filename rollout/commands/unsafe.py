"""The line that tells what a run with ``[unsafe]`` arms came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from interlace.rollout.callbacks import Callback
from interlace.rollout.config import ConfigError, RolloutConfig
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.unsafe_mark import in_words
from interlace.rollout.unsafe_outcome import Outcome, outcome_of, safe_digests


class UnsafeWatch(Callback):
    """Keeps what a run delivers and, if arms are on, says what it came to.

    Where trajectories were delivered the job is run once more, safely and in this process, to
    compare the tokens; not after an error under torchrun, which soon ends this process.
    """

    def __init__(self, config: RolloutConfig, tasks: Sequence[Task], console: Console) -> None:
        self._config, self._tasks, self._console = config, tasks, console
        self._delivered: list[Trajectory] = []

    def on_start(self, config: RolloutConfig) -> None:
        return None

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        return None

    def on_trajectory(self, trajectory: Trajectory) -> None:
        if self._config.unsafe.arms:
            self._delivered.append(trajectory)

    def tell(self, error: BaseException | None = None) -> dict[str, Any] | None:
        """Prints the outcome; what summary.json says of it. None, and silent, without arms."""
        unsafe = self._config.unsafe
        if not unsafe.arms or isinstance(error, ConfigError | KeyboardInterrupt):
            return None
        hurried = error is not None and self._config.launch.kind == "torchrun"
        safe = None
        if self._delivered and not hurried:
            safe = safe_digests(self._config, self._tasks)
        outcome = outcome_of(self._delivered, error, safe)
        self._say(outcome)
        return {
            "arms": list(unsafe.arms),
            "without": list(unsafe.without),
            "seed": unsafe.seed,
            "outcome": outcome.value,
        }

    def _say(self, outcome: Outcome) -> None:
        line = f"UNSAFE: {in_words(self._config.unsafe)}: {outcome.value} ({outcome.meaning})"
        self._console.print(line, style="bold red", markup=False)
