"""Environments that are hard to bring back. Imported by name in environment processes."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
from gymnasium import spaces


class Forgetful(gymnasium.Env[str, str]):
    """Four steps; what it says depends on the process it lives in, from step `differs_at` on."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so

    def __init__(self, *, differs_at: int = 0, ends_at: int = 4) -> None:
        self.observation_space = spaces.Text(64)
        self.action_space = spaces.Text(4096)
        self._differs_at, self._ends_at, self._steps = differs_at, ends_at, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._said(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._said(), 1.0, self._steps == self._ends_at, False, {}

    def _said(self) -> str:
        return f"process {os.getpid()}" if self._steps >= self._differs_at else "go on"
