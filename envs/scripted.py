"""An environment that plays a script: so many tokens, so many turns, so long a wait, whatever the
model says. Workloads for measurements are made of it."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from interlace.envs.text import text_space

_LINE = 64
_LETTERS = np.frombuffer(string.ascii_lowercase.encode(), np.uint8)
_DIGITS = np.frombuffer(string.digits.encode(), np.uint8)
_MAX_CHARS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    num_generated: int
    num_appended: int
    wait_s: float
    num_retries: int


class Scripted(gymnasium.Env[str, str]):
    """Plays `turns`, then terminates; reward 0. What the model says changes nothing.

    `info["num_tokens"]` prescribes the length of the next turn, `info["wait_s"]` is the latency of
    the reset or step, `info["retries"]` counts the failed attempts so far. Observations depend on
    the seed of `reset` and the turn alone. A character of text is a token: see `plain_text`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    copyable = True
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        prompt: Sequence[Sequence[int]],
        turns: Sequence[Sequence[float]],
        reset_s: float = 0.0,
        sleep: bool = True,
    ) -> None:
        """`prompt` is pieces [seed, tokens]: equal beginnings of two prompts are equal text.

        `turns` are [tokens to generate, tokens appended behind them, latency of the step in
        seconds, failed attempts within it]; what the last one appends is not read. Without `sleep`
        nothing is waited for. Raises ValueError with the place of whatever is not so.
        """
        if not prompt or not turns:
            raise ValueError("a script needs at least one piece of prompt and one turn")
        for place, piece in enumerate(prompt):
            if len(piece) != 2 or not all(_is_count(x) for x in piece) or piece[1] < 1:
                raise ValueError(
                    f"prompt[{place}] should be [seed, tokens], both whole, tokens from 1 on; "
                    f"found {list(piece)}"
                )
        if not (math.isfinite(reset_s) and reset_s >= 0):
            raise ValueError(f"reset_s must be 0 or more seconds, not {reset_s}")
        self._turns = tuple(_turn(place, turn) for place, turn in enumerate(turns))
        self._prompt = tuple((int(seed), int(num)) for seed, num in prompt)
        self._reset_s, self._sleep = float(reset_s), sleep
        self.observation_space = text_space(_MAX_CHARS)
        self.action_space = text_space(_MAX_CHARS)
        self._seed, self._at, self._num_retries = 0, len(self._turns), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The prompt, which does not depend on the seed, and the length of the first turn."""
        super().reset(seed=seed)
        self._seed, self._at, self._num_retries = seed or 0, 0, 0
        info = {"num_tokens": self._turns[0].num_generated}
        return prompt_text(self._prompt), info | self._waiting(self._reset_s)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The next observation. Raises ResetNeeded before a reset and after the end."""
        if self._at == len(self._turns):
            raise gymnasium.error.ResetNeeded("reset the script before a step")
        turn = self._turns[self._at]
        self._at += 1
        self._num_retries += turn.num_retries
        info = {"retries": self._num_retries} | self._waiting(turn.wait_s)
        if self._at == len(self._turns):
            return "", 0.0, True, False, info
        info["num_tokens"] = self._turns[self._at].num_generated
        text = plain_text([(self._seed, self._at, turn.num_appended)])
        return text, 0.0, False, False, info

    def _waiting(self, seconds: float) -> dict[str, float]:
        return {"wait_s": seconds} if self._sleep and seconds else {}


def prompt_text(pieces: Sequence[tuple[int, int]]) -> str:
    """The text of a prompt's pieces, each (seed, tokens)."""
    return plain_text([(seed, 0, num) for seed, num in pieces])


def plain_text(pieces: Sequence[tuple[int, int, int]]) -> str:
    """Lines of letters and digits in turn, as in ``k3w9``, of exactly as many characters as asked.

    Each piece is (seed, stream, characters); equal pieces at the same place are equal text, and a
    longer one begins with a shorter one. Letters and digits never stand beside their own kind, so
    a tokenizer that parts letters from digits before it merges (the families of GPT-2, Llama 3,
    Qwen, DeepSeek, SmolLM2, and the random models here) makes one token of each character.
    """
    parts = []
    for seed, stream, num in pieces:
        bits = np.random.Philox(key=np.array([seed, stream], np.uint64))
        parts.append(bits.random_raw(num))
    raw = np.concatenate(parts)
    place = np.arange(len(raw))
    chars = np.where(place % 2, _DIGITS[raw % 10], _LETTERS[raw % 26])
    chars[(place % _LINE == _LINE - 1) & (place < len(raw) - 1)] = ord("\n")
    return bytes(chars.astype(np.uint8)).decode("ascii")


def _turn(place: int, turn: Sequence[float]) -> _Turn:
    if len(turn) == 4:
        generated, appended, wait_s, retries = turn
        counts = _is_count(generated) and _is_count(appended) and _is_count(retries)
        if counts and min(generated, appended) >= 1 and math.isfinite(wait_s) and wait_s >= 0:
            return _Turn(
                num_generated=int(generated),
                num_appended=int(appended),
                wait_s=float(wait_s),
                num_retries=int(retries),
            )
    raise ValueError(
        f"turns[{place}] should be [tokens to generate, tokens to append, seconds, failed "
        f"attempts], tokens from 1 on; found {list(turn)}"
    )


def _is_count(value: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
