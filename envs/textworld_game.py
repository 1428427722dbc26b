"""TextWorld: text adventures that are generated, with their goals, from a seed.

Needs the PyPI package `textworld` (the `textworld` extra). It brings an interpreter under the GPL,
which runs in the process of the environment only.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium
import textworld
from gymnasium import spaces
from textworld.challenges import CHALLENGES

from interlace.envs.text import printable, text_space

GAMES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "coin_collector": {"level": 1},
        "cooking": {
            **{"recipe": 1, "take": 1, "go": 1, "recipe_seed": 0, "split": "train"},
            **{"open": False, "cook": False, "cut": False, "drop": False},
        },
        "simple": {"rewards": "dense", "goal": "detailed", "test": False},
        "treasure_hunter": {"level": 1},
    }
)
"""The games, and their settings with defaults. Coin collectors have levels 1 to 300 (those of more
than 100 rooms are refused), treasure hunters 1 to 30."""

_INFOS = ("admissible_commands", "max_score", "objective", "policy_commands", "score")
_MAX_LENGTH = 8192
_MAX_COMMAND = 100
_ROOM = re.compile(r"^ *-= ", re.MULTILINE)
_STATUS = re.compile(r"\s*>?\s*(-=[^\n]*=-\d+/\d+\s*)?\Z")
_END = re.compile(r"\s*\*\*\* The End \*\*\*.*", re.DOTALL)
_BLANK_LINES = re.compile(r"\n(\s*\n)+")
_NEXT_COMMAND = re.compile(r"[.,;:!?]|\bthen\b", re.IGNORECASE)
_NO_MOVES = frozenset(
    {
        *("brief", "normal", "notify", "oops", "pronouns", "q", "quit", "restart", "restore"),
        *("save", "script", "short", "superbrief", "long", "transcript", "undo", "unscript"),
        *("verbose", "verify", "version"),
    }
)
"""Commands about the game and its files, which are not passed on; nor are those of its makers,
which begin with tw-."""


class TextWorldGame(gymnasium.Env[str, str]):
    """Play a generated game with commands such as `open chest`; reward is the change of score over
    the highest score.

    The first line of a reply that is not empty is the command, up to a full stop. Terminated when
    the game is won or lost, truncated after `max_steps`. `valid_action` is whether the command was
    among the admissible ones; the game answers others as well. `info["success"]` comes with the
    end. The same seed gives the same game, and the same commands the same texts. A reset takes
    seconds: it generates and compiles a game.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        game: str = "coin_collector",
        settings: Mapping[str, Any] | None = None,
        max_steps: int = 50,
        choices: bool = False,
    ) -> None:
        """`settings` change those in `GAMES`; `choices` supplies the admissible commands in every
        info.

        Raises ValueError for an unknown game or setting and for `max_steps` < 1; a value that a
        setting cannot have is found out by the reset.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        if game not in GAMES:
            raise ValueError(f"there is no game {game!r}: choose one of {', '.join(sorted(GAMES))}")
        unknown = sorted(set(settings or {}) - set(GAMES[game]))
        if unknown:
            raise ValueError(
                f"{game} has no setting {unknown[0]!r}, only {', '.join(sorted(GAMES[game]))}"
            )
        self.observation_space = text_space(_MAX_LENGTH)
        self.action_space = text_space(4096)
        self._game = game
        self._settings = {**GAMES[game], **(settings or {})}
        self._max_steps = max_steps
        self._choices = choices
        self._num_steps = 0
        self._files: _GameFiles | None = None
        self._play: Any = None
        self._state: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new game from the seed. Raises ValueError for settings no game can have."""
        super().reset(seed=seed)
        self.close()
        self._num_steps = 0
        self._files = _generated(self._game, self._settings, int(self.np_random.integers(2**31)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter knows no generated game by name
            infos = textworld.EnvInfos(**dict.fromkeys(_INFOS, True))
            self._play = textworld.start(self._files.path, infos)
            self._play.seed(0)
            self._state = self._play.reset()
        return _opening(self._state), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One command. Raises ResetNeeded before a reset and after the end."""
        if self._play is None:
            raise gymnasium.error.ResetNeeded("reset the game before a step")
        self._num_steps += 1
        before = self._state
        command = _command(action)
        terminated = False
        if command and not _is_no_move(command):
            self._state, _, terminated = self._play.step(command)
            text = _shown(self._state.feedback)
        else:
            text = "Say a command of the game."
        reward = (self._state.score - before.score) / max(1, self._state.max_score)
        truncated = not terminated and self._num_steps >= self._max_steps
        info = self._info() | {"valid_action": command in before.admissible_commands}
        if terminated or truncated:
            info["success"] = bool(self._state.won)
            self.close()
        return text, reward, bool(terminated), truncated, info

    def close(self) -> None:
        """End the interpreter and let go of the game's files; may be called twice."""
        if self._play is not None:
            self._play.close()
        self._play = self._files = None

    def copy(self) -> TextWorldGame:
        """See `interlace.envs.snapshot.copied`: the interpreter copies itself, the game's files
        stay until both are closed."""
        other = copy.copy(self)
        other.np_random = copy.deepcopy(self.np_random)
        if self._play is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other._play = self._play.copy()
        return other

    def _info(self) -> dict[str, Any]:
        offered = {"choices": list(self._state.admissible_commands)} if self._choices else {}
        return offered | {"score": int(self._state.score)}


class _GameFiles:
    """The files of a game, in a folder of their own; removed with their last user."""

    def __init__(self, folder: str, path: str) -> None:
        self.path = path
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


def _generated(game: str, settings: Mapping[str, Any], seed: int) -> _GameFiles:
    folder = tempfile.mkdtemp(prefix="textworld-")
    try:
        options = textworld.GameOptions()
        options.seeds = seed
        options.path = os.path.join(folder, "game.z8")
        _, make, _ = CHALLENGES[f"tw-{game}"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            textworld.generator.compile_game(make(dict(settings), options), options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Only now: the generator keeps references to the frames it was called from.
    return _GameFiles(folder, options.path)


def _opening(state: Any) -> str:
    """The goal and the first room, without the title in big letters."""
    text = state.feedback
    room = _ROOM.search(text)
    return _shown(f"{state.objective}\n{text[room.start() :] if room else text}")


def _shown(text: str) -> str:
    text = _END.sub("\nThe End.", _STATUS.sub("", text)).strip()
    return printable(_BLANK_LINES.sub("\n", text) or "Nothing happens.", _MAX_LENGTH)


def _command(action: str) -> str:
    """One command: the game would take several of a line, without telling what each did."""
    parts = (_NEXT_COMMAND.split(line)[0].strip() for line in action.splitlines())
    return printable(next((part for part in parts if part), ""), _MAX_COMMAND)


def _is_no_move(command: str) -> bool:
    word = command.split()[0].lower()
    return word in _NO_MOVES or word.startswith("tw-")
