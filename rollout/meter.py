"""Counts what a rollout does while it does it, and tells the callbacks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .callbacks import Callback, CallbackError
from .config import RolloutConfig
from .trajectory import Trajectory

PERIOD_S = 5.0


class Meter:
    """Lives in the collector's event loop. Every method that tells callbacks may raise
    CallbackError."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: Counter[str] = Counter()
        """Environment -> episodes begun and not finished."""
        self._callbacks, self._period_s, self._clock = tuple(callbacks), period_s, clock
        self._started = False
        self._num_trajectories = self._num_tokens = 0
        self._returns = 0.0
        self._began_at = self._told_at = clock()
        self._told_tokens = 0

    def start(self, config: RolloutConfig) -> None:
        """The time counts from here."""
        self._started = True
        self._began_at = self._told_at = self._clock()
        self._tell("on_start", config)

    @contextmanager
    def playing(self, env: str) -> Iterator[None]:
        """One more episode of `env` runs until the block ends."""
        self.running[env] += 1
        try:
            yield
        finally:
            self.running[env] -= 1

    def sampled(self, num_tokens: int) -> None:
        """A turn is finished."""
        self._num_tokens += num_tokens

    def finished(self, trajectory: Trajectory) -> None:
        """A trajectory has its rewards."""
        self._num_trajectories += 1
        self._returns += trajectory.return_
        self._tell("on_trajectory", trajectory)

    async def tick(self) -> None:
        """Tell the metrics every period, until cancelled. Any number of these tell them once."""
        while True:
            await asyncio.sleep(max(0.0, self._told_at + self._period_s - self._clock()))
            if self._clock() - self._told_at >= self._period_s:
                self._tell_metrics()

    def end(self, *, completed: bool, **rest: Any) -> None:
        """The last metrics and the end; a failure that ended the rollout is not covered up."""
        if not self._started:
            return
        self._started = False
        num = self._num_trajectories
        summary = {
            "completed": completed,
            "trajectories": num,
            "sampled_tokens": self._num_tokens,
            "return_mean": self._returns / num if num else None,
            **rest,
        }
        errors: list[CallbackError] = []
        for told in (self._tell_metrics, lambda: self._tell("on_end", summary)):
            try:
                told()
            except CallbackError as error:
                errors.append(error)
        if errors and completed:
            raise errors[0]

    def _tell_metrics(self) -> None:
        now = self._clock()
        seconds, num = now - self._told_at, self._num_tokens - self._told_tokens
        self._told_at, self._told_tokens = now, self._num_tokens
        self._tell(
            "on_metrics",
            {
                "elapsed_s": now - self._began_at,
                "trajectories": self._num_trajectories,
                "sampled_tokens": self._num_tokens,
                "tokens_per_s": num / seconds if seconds > 0 else None,
                "running": {env: num for env, num in sorted(self.running.items()) if num},
            },
        )

    def _tell(self, method: str, argument: Any) -> None:
        """All of them hear of it, whatever the first does."""
        failed: list[tuple[Callback, Exception]] = []
        for callback in self._callbacks:
            try:
                getattr(callback, method)(argument)
            except Exception as error:
                failed.append((callback, error))
        if failed:
            first, cause = failed[0]
            raise CallbackError(
                f"{type(first).__name__}.{method} raised {type(cause).__name__}: {cause}"
            ) from cause
