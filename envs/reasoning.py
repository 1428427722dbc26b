"""Any procedural data set of reasoning-gym as single-turn tasks.

Needs the PyPI package `reasoning-gym` (the `reasoning` extra).
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import spaces
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from interlace.envs.replies import answer_block_in
from interlace.envs.text import AnyText, text_space

_MAX_LENGTH = 50_000
_MAX_ANSWER = 8192
_NUM_SEEDS = 2**31
_ONE_LINE = "End with a line ANSWER: followed by the answer alone."
_MANY_LINES = "End with a line ANSWER: and below it the answer alone."


class Reasoning(gymnasium.Env[str, str]):
    """One question, one reply; reward is the data set's own score of the answer, 0 to 1.

    The answer is what the last `<answer>` tags hold, else what stands behind the last `ANSWER:` at
    the beginning of a line, else the last line. Where the reference answer has several lines, or
    there is none, an answer may have several. Some scorers evaluate the answer as an expression:
    one that takes forever is the pool's to end, as any step. Terminated after every reply;
    `info["success"]` is whether the score is full, `info["reference"]` the reference answer.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        dataset: str = "chain_sum",
        index: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """The task of a seed is item `index` of the data set made with that seed and with
        `options`, fields of its configuration.

        Raises ValueError for an unknown data set, a negative index and options that the data set
        refuses; TypeError for options it does not have.
        """
        if dataset not in DATASETS:
            near = ", ".join(difflib.get_close_matches(dataset, DATASETS)) or "chain_sum"
            raise ValueError(f"there is no data set {dataset!r}: did you mean {near}?")
        if index < 0:
            raise ValueError(f"index must be at least 0, not {index}")
        self.observation_space = AnyText(_MAX_LENGTH)
        self.action_space = text_space(4096)
        self._kind, configuration = DATASETS[dataset]
        self._options = {"size": index + 1} | dict(options or {})
        self._configuration = configuration
        self._index = index
        self._dataset: Any = None
        self._entry: dict[str, Any] | None = None
        try:
            self._configured(0)
        except AssertionError as error:
            raise ValueError(f"data set {dataset!r}: {error}") from error

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The question of the seed."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(_NUM_SEEDS)) if seed is None else seed % _NUM_SEEDS
        self._dataset = self._kind(config=self._configured(drawn))
        self._entry = entry = self._dataset[self._index]
        how_to = _MANY_LINES if _has_lines(entry) else _ONE_LINE
        return f"{entry['question'].strip()}\n{how_to}"[:_MAX_LENGTH], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The reply, scored. Raises ResetNeeded before a reset and after the end."""
        entry = self._entry
        if entry is None:
            raise gymnasium.error.ResetNeeded("reset the question before a step")
        self._entry = None
        answer = _answer_in(action, several_lines=_has_lines(entry))
        score = self._score(answer, entry) if answer else None
        reward = score or 0.0
        text = "Right." if reward == 1 else "Wrong." if reward == 0 else f"Score: {reward:.3g}."
        info = {
            "valid_action": score is not None,
            "success": reward == 1,
            "reference": entry["answer"],
        }
        return text, reward, True, False, info

    def copy(self) -> Reasoning:
        """See `interlace.envs.snapshot.copied`: the data set itself never changes."""
        other = copy.copy(self)
        other.np_random = copy.deepcopy(self.np_random)
        return other

    def _configured(self, seed: int) -> Any:
        configuration = self._configuration(**self._options, seed=seed)
        if hasattr(configuration, "validate"):
            configuration.validate()
        return configuration

    def _score(self, answer: str, entry: dict[str, Any]) -> float | None:
        """None if the scorer cannot read the answer: what it raises then is anything."""
        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception:
            return None
        return min(1.0, max(0.0, score)) if math.isfinite(score) else None


def _has_lines(entry: Mapping[str, Any]) -> bool:
    return not isinstance(entry["answer"], str) or "\n" in entry["answer"].strip()


def _answer_in(reply: str, *, several_lines: bool) -> str:
    tagged = extract_answer(reply)
    if tagged is not None:
        return str(tagged)[:_MAX_ANSWER]
    marked = answer_block_in(reply)
    if marked is None:
        marked = reply if several_lines else reply.strip().rpartition("\n")[2]
    marked = marked.strip()
    return (marked if several_lines else marked.partition("\n")[0].strip())[:_MAX_ANSWER]
