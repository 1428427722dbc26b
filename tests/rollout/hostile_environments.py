"""Environments that misbehave, each in its own way. Imported by name in environment processes."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import gymnasium
from gymnasium import spaces


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Hostile(gymnasium.Env[Any, str]):
    """Plays along for three steps, except for the one misdeed it is named after."""

    metadata = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so

    def __init__(self, *, misdeed: str) -> None:
        self.observation_space = spaces.Text(64)
        self.action_space = spaces.Text(4096)
        self._misdeed = misdeed
        self._steps = 0
        if misdeed == "constructor_raises":
            raise RuntimeError("no such world")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        if self._misdeed == "reset_raises":
            raise RuntimeError("no such beginning")
        if self._misdeed == "reset_returns_text_alone":
            return "only text"  # type: ignore[return-value]
        return "begin", {}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        self._steps += 1
        last = self._steps == 3
        misdeed = getattr(self, f"_{self._misdeed}", None)
        if misdeed is not None:
            misdeed()
        observation = {
            "lone_surrogate": "before \udcff after",
            "bytes_observation": b"\xff\xfe",
            "observation_is_none": None,
            "huge_observation": "word " * 2_000_000,
            "observation_over_the_context": "word " * 2000,
        }.get(self._misdeed, "go on")
        reward = {"nan_reward": float("nan"), "text_reward": "plenty"}.get(self._misdeed, 0.0)
        info = {"object_in_info": {"self": self}}.get(self._misdeed, {})
        if self._misdeed == "three_values":
            return observation, reward, last  # type: ignore[return-value]
        return observation, reward, last, False, info

    def _prints_a_gigabyte(self) -> None:
        if self._steps == 1:
            mebibyte = "x" * (1 << 20)
            for _ in range(1024):
                sys.stdout.write(mebibyte)

    def _writes_to_descriptors(self) -> None:
        os.write(1, b"\xff" * 65536)
        os.write(2, b"\xff" * 65536)

    def _reads_stdin(self) -> None:
        sys.stdin.read()

    def _step_raises(self) -> None:
        raise ValueError("no such move")

    def _unprintable_error(self) -> None:
        raise Unprintable

    def _sys_exit(self) -> None:
        sys.exit(3)

    def _keyboard_interrupt(self) -> None:
        raise KeyboardInterrupt

    def _endless_recursion(self) -> None:
        self._endless_recursion()

    def _kills_its_process(self) -> None:
        os._exit(9)

    def _hangs(self) -> None:
        time.sleep(3600)
