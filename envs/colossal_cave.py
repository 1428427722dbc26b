"""Colossal Cave: hundreds of short turns, so contexts grow long and prefills stay small.

Needs the PyPI package `adventure` (the `demo` extra).
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from adventure import load_advent_dat
from adventure.game import YESNO_ANSWERS, Game
from gymnasium import spaces

from interlace.envs.text import printable, text_space

COMMANDS = (
    *("north", "south", "east", "west", "up", "down", "in", "out", "look", "inventory"),
    *("take keys", "take lamp", "take food", "take bottle", "take cage", "take rod", "take bird"),
    *("light lamp", "unlock grate", "drop rod", "drop bird", "wave rod", "xyzzy", "plugh"),
    *("yes", "no"),
)
"""A weak player's repertoire: what `choices=true` offers on every turn."""

_FULL_SCORE = 350
_MAX_LENGTH = 4096
_WORD = re.compile(r"[a-z]+")
_ABOUT_FILES = frozenset({"save", "suspend", "pause"})


class _Cave(Game):  # type: ignore[misc]  # adventure is untyped
    """The game, with a note on whether the last command was understood."""

    understood = True

    def dont_understand(self) -> None:
        self.understood = False
        super().dont_understand()


class ColossalCave(gymnasium.Env[str, str]):
    """Explore the cave with one- or two-word commands; reward is the change of score over 350.

    The first line of a reply that has words is the command, cut to its first two words: the game
    answers what it does not know. Terminated when the game ends, truncated after `max_steps`.
    Same seed and same replies, same texts. Commands about files are answered, never obeyed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    copyable = True
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self, *, max_steps: int = 200, choices: bool = False, instructions: bool = False
    ) -> None:
        """`choices` supplies a fixed list of commands in every info; `instructions` reads the
        game's own introduction first, which costs a few points.

        Raises ValueError for `max_steps` < 1.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        self.observation_space = text_space(_MAX_LENGTH)
        self.action_space = text_space(_MAX_LENGTH)
        self._max_steps = max_steps
        self._choices = choices
        self._instructions = instructions
        self._game: _Cave | None = None
        self._num_steps = 0
        self._score = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new game whose luck follows from the seed."""
        super().reset(seed=seed)
        self._num_steps = 0
        self._game = game = _Cave(int(self.np_random.integers(2**31)))
        load_advent_dat(game)
        game.start()
        text = game.do_command(["yes" if self._instructions else "no"])
        self._score = int(game.compute_score()[0])
        return f"Explore the cave in commands of one or two words.\n{_shown(text)}", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One command. Raises ResetNeeded before a reset and after the end."""
        game = self._game
        if game is None:
            raise gymnasium.error.ResetNeeded("reset the cave before a step")
        self._num_steps += 1
        text, valid_action = _obey(game, _command(action))
        score = int(game.compute_score()[0])
        reward = (score - self._score) / _FULL_SCORE
        self._score = score
        terminated = bool(game.is_finished)
        truncated = not terminated and self._num_steps >= self._max_steps
        if terminated or truncated:
            self._game = None
        info = self._info() | {"valid_action": valid_action}
        return _shown(text), reward, terminated, truncated, info

    def _info(self) -> dict[str, Any]:
        offered: dict[str, Any] = {"choices": list(COMMANDS)} if self._choices else {}
        return offered | {"score": self._score}


def _command(action: str) -> list[str]:
    lines = (_WORD.findall(line) for line in action[:_MAX_LENGTH].lower().splitlines())
    return next((words for words in lines if words), [])[:2]


def _obey(game: _Cave, words: list[str]) -> tuple[str, bool]:
    """The game's answer, and whether it understood."""
    if not words:
        return "Say something: one or two words.", False
    if words[0] in _ABOUT_FILES:
        return "Games cannot be saved here.", False
    asked = bool(game.yesno_callback) and not game.yesno_casual
    if asked and words[0] not in YESNO_ANSWERS:
        return "Please answer yes or no.", False
    game.understood = True
    try:
        text = game.do_command(words)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # The game lacks some verb and noun pairs ("hours lamp") and says so by an exception.
        return "You cannot do that.", False
    return text, game.understood


def _shown(text: str) -> str:
    return printable(text.strip() or "Nothing happens.", _MAX_LENGTH - 100)
