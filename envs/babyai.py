"""BabyAI and MiniGrid as text: find, fetch and open things in rooms seen a few steps ahead.

Needs the PyPI package `minigrid` (the `babyai` extra).
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import gymnasium
import minigrid  # noqa: F401 -- registers its levels
from gymnasium import spaces
from gymnasium.envs.registration import registry

from interlace.envs.text import printable, text_space

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
"""In the order of minigrid's actions 0 to 6. To toggle is to open, close or unlock."""

_ACTION = re.compile(r"\b(left|right|forward|pick ?up|drop|toggle|done)\b", re.IGNORECASE)
_ORDER = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
_FACING = ("east", "south", "west", "north")
_FAMILIES = ("BabyAI-", "MiniGrid-")
_MAX_LENGTH = 4096


class BabyAIText(gymnasium.Env[str, str]):
    """Carry out a mission in a grid of rooms; the last action named in a reply is taken.

    Observations say what is free, what is carried and what is seen, by steps ahead and to the
    sides; only the first one has the mission and the actions. Reward is the level's: up to 1 for
    the mission, less the longer it took; `info["success"]` comes with the end. Terminated when the
    mission is done or failed, truncated after `max_steps`. A reply without an action counts as a
    step and has `valid_action` False. `info["choices"]` holds the level's actions, in words.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    copyable = True
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(self, *, level: str = "BabyAI-GoToLocal-v0", max_steps: int | None = None) -> None:
        """`level` is the id of any level of minigrid, as in BabyAI-BossLevel-v0 or
        MiniGrid-DoorKey-6x6-v0; `max_steps` is by default what the level allows.

        Raises ValueError for an unknown level and `max_steps` < 1.
        """
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        levels = [name for name in registry if name.startswith(_FAMILIES)]
        if level not in levels:
            near = ", ".join(difflib.get_close_matches(level, levels)) or "BabyAI-GoToLocal-v0"
            raise ValueError(f"there is no level {level!r}: did you mean {near}?")
        self.observation_space = text_space(_MAX_LENGTH)
        self.action_space = text_space(_MAX_LENGTH)
        # By its specification: an id alone would warn where a newer version exists.
        made: Any = gymnasium.make(registry[level], disable_env_checker=True)
        self._grid = made.unwrapped
        self._actions = ACTIONS[: int(self._grid.action_space.n)]
        self._limit = max_steps
        self._num_steps = 0
        self._playing = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """New rooms and a new mission, both from the seed."""
        super().reset(seed=seed)
        self._num_steps = 0
        self._playing = True
        seen, _ = self._grid.reset(seed=int(self.np_random.integers(2**31)))
        text = (
            f"Mission: {seen['mission']}.\nReply with {', '.join(self._actions[:-1])} or "
            f"{self._actions[-1]}.\n{self._description()}"
        )
        return printable(text, _MAX_LENGTH), {"choices": list(self._actions)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One action. Raises ResetNeeded before a reset and after the end."""
        if not self._playing:
            raise gymnasium.error.ResetNeeded("reset the level before a step")
        self._num_steps += 1
        taken = self._named(action)
        reward, terminated, truncated = 0.0, False, False
        if taken is None:
            text = f"Say {', '.join(self._actions[:-1])} or {self._actions[-1]}."
        else:
            _, raw_reward, terminated, truncated, _ = self._grid.step(taken)
            reward, terminated = float(raw_reward), bool(terminated)
            text = self._description()
            if terminated:
                text = "Mission accomplished." if reward > 0 else "Mission failed."
        limit = self._grid.max_steps if self._limit is None else self._limit
        truncated = not terminated and (bool(truncated) or self._num_steps >= limit)
        info = {"choices": list(self._actions), "valid_action": taken is not None}
        if terminated or truncated:
            self._playing = False
            info["success"] = reward > 0
        return printable(text, _MAX_LENGTH), reward, terminated, truncated, info

    def close(self) -> None:
        """May be called twice."""
        self._grid.close()

    def _named(self, reply: str) -> int | None:
        found = [_ORDER.index(word.lower().replace(" ", "")) for word in _ACTION.findall(reply)]
        known = [action for action in found if action < len(self._actions)]
        return known[-1] if known else None

    def _description(self) -> str:
        cells, visible = self._grid.gen_obs_grid()
        column, row = cells.width // 2, cells.height - 1
        ahead, left, right = (
            _num_free(cells, visible, column, row, *direction)
            for direction in ((0, -1), (-1, 0), (1, 0))
        )
        carried = self._grid.carrying
        things = [
            (row - y, x - column, _named_thing(cells.get(x, y)))
            for x in range(cells.width)
            for y in range(cells.height)
            if visible[x, y] and (x, y) != (column, row) and _is_thing(cells.get(x, y))
        ]
        things.sort(key=lambda thing: (thing[0] + abs(thing[1]), thing))
        seen = "; ".join(f"{name}{_place(up, side)}" for up, side, name in things)
        return (
            f"Facing {_FACING[int(self._grid.agent_dir)]}. "
            f"Free: {ahead} ahead, {left} left, {right} right. "
            f"Carrying: {_named_thing(carried) if carried else 'nothing'}. "
            f"You see: {seen or 'nothing'}."
        )


def _num_free(cells: Any, visible: Any, x: int, y: int, dx: int, dy: int) -> int:
    """Cells one could walk over in one direction, as far as is seen."""
    count = 0
    while True:
        x, y = x + dx, y + dy
        if not (0 <= x < cells.width and 0 <= y < cells.height) or not visible[x, y]:
            return count
        cell = cells.get(x, y)
        if cell is not None and not cell.can_overlap():
            return count
        count += 1


def _is_thing(cell: Any) -> bool:
    return cell is not None and cell.type not in ("wall", "floor")


def _named_thing(cell: Any) -> str:
    if cell.type == "lava":
        return "lava"
    if cell.type != "door":
        return f"{cell.color} {cell.type}"
    state = "open" if cell.is_open else "locked" if cell.is_locked else "closed"
    return f"{state} {cell.color} door"


def _place(ahead: int, side: int) -> str:
    parts = [f" {ahead} ahead"] if ahead else []
    if side:
        parts.append(f" {abs(side)} {'left' if side < 0 else 'right'}")
    return "".join(parts)
