"""Frozen lake as text: the smallest environment, learnable in seconds, ~11 tokens a turn."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map

from interlace.envs.text import text_space

DIRECTIONS = ("left", "down", "right", "up")
"""In the order of gymnasium's actions 0 to 3."""

_DIRECTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_STANDARD_SIZES = (4, 8)


class FrozenLakeText(gymnasium.Env[str, str]):
    """Walk over the ice from S to G; the last direction named in a reply is the move.

    Reward 1 on the goal, else 0. Terminated on the goal or in a hole, truncated after `max_steps`.
    A reply without a direction moves nobody, counts as a step and has `valid_action` False.
    `info["choices"]` holds the four words on reset and every step.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    copyable = True
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        size: int = 4,
        is_slippery: bool = False,
        max_steps: int = 20,
        random_map: bool = False,
        frozen_share: float = 0.8,
    ) -> None:
        """`random_map` draws a new map of `size` x `size` tiles, one in which G can be reached, at
        every reset from its seed; else size 4 and 8 have gymnasium's maps.

        Raises ValueError for a size without a map, `max_steps` < 1 or a share outside 0.5 to 1.
        """
        if not random_map and size not in _STANDARD_SIZES:
            raise ValueError(
                f"there is no standard map of size {size}, only of {_STANDARD_SIZES}: "
                "set random_map=true for other sizes"
            )
        if not 2 <= size <= 64:
            raise ValueError(f"size must be 2 to 64, not {size}")
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        if not 0.5 <= frozen_share <= 1:
            raise ValueError(f"frozen_share must be 0.5 to 1, not {frozen_share}")
        self.observation_space = text_space(size * (size + 1) + 400)
        self.action_space = text_space(4096)
        self._size = size
        self._is_slippery = is_slippery
        self._max_steps = max_steps
        self._random_map = random_map
        self._frozen_share = frozen_share
        self._lake: FrozenLakeEnv | None = None
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new episode; the same seed gives the same map, ice and first observation."""
        super().reset(seed=seed)
        self._num_steps = 0
        if self._random_map:
            map_seed = int(self.np_random.integers(2**31))
            tiles = generate_random_map(self._size, self._frozen_share, map_seed)
        else:
            tiles = list(MAPS[f"{self._size}x{self._size}"])
        self._lake = FrozenLakeEnv(desc=tiles, is_slippery=self._is_slippery)
        state, _ = self._lake.reset(seed=int(self.np_random.integers(2**31)))
        grid = "\n".join(tiles)
        slippery = " The ice is slippery." if self._is_slippery else ""
        text = (
            f"Cross the frozen lake from S to G. F is ice, H is a hole.{slippery}\n{grid}\n"
            f"Reply with left, down, right or up.\n{self._position(int(state))}"
        )
        return text, {"choices": list(DIRECTIONS)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One move. Raises ResetNeeded before a reset and after the end."""
        if self._lake is None:
            raise gymnasium.error.ResetNeeded("reset the frozen lake before a step")
        self._num_steps += 1
        named = _DIRECTION.findall(action)
        reward, terminated = 0.0, False
        if named:
            state, raw_reward, terminated, _, _ = self._lake.step(
                DIRECTIONS.index(named[-1].lower())
            )
            reward, terminated = float(raw_reward), bool(terminated)
            text = self._position(int(state))
            if terminated:
                text = "You reached the goal." if reward > 0 else "You fell into a hole."
        else:
            text = "Say left, down, right or up."
        truncated = not terminated and self._num_steps >= self._max_steps
        if terminated or truncated:
            self._lake = None
        info = {"choices": list(DIRECTIONS), "valid_action": bool(named)}
        return text, reward, terminated, truncated, info

    def _position(self, state: int) -> str:
        row, column = divmod(state, self._size)
        return f"You are at row {row}, column {column}."
