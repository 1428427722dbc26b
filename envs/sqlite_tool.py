"""A tool environment: look things up in a small database with SQL, then answer a question."""

from __future__ import annotations

import sqlite3
from typing import Any

import gymnasium
from gymnasium import spaces

from interlace.envs.replies import answer_in, code_in
from interlace.envs.shop import Shop
from interlace.envs.task import Task
from interlace.envs.text import printable, text_space

_MAX_REPLY = 16_384
_HOW_TO = "Send one SQL query to see its rows, or reply ANSWER: followed by the answer."


class SqliteTool(gymnasium.Env[str, str]):
    """Answer a generated question about generated tables; queries are free, the answer counts.

    A reply with a line `ANSWER: x` ends the episode with reward 1 if x is right and 0 if not. Any
    other reply is a query: the first fenced block, else the whole text. Its rows, or the error, are
    the observation. Truncated after `max_steps`. Nothing but reading is allowed, a query has a
    budget of machine steps and none depends on chance or the clock, so replies decide everything.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    copyable = True
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        max_steps: int = 8,
        num_orders: int = 60,
        max_rows: int = 20,
        max_chars: int = 1000,
    ) -> None:
        """An observation shows at most `max_rows` rows and `max_chars` characters of them.

        Raises ValueError for a number below 1.
        """
        for name, value in (
            ("max_steps", max_steps),
            ("num_orders", num_orders),
            ("max_rows", max_rows),
            ("max_chars", max_chars),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.observation_space = text_space(max_chars + 1000)
        self.action_space = text_space(4096)
        self._max_steps = max_steps
        self._num_orders = num_orders
        self._max_rows = max_rows
        self._max_chars = max_chars
        self._num_steps = 0
        self._shop: Shop | None = None
        self._task: Task | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """New tables and a new question, both from the seed."""
        super().reset(seed=seed)
        self.close()
        self._num_steps = 0
        self._shop = Shop(self.np_random, self._num_orders)
        self._task = self._shop.draw_task(self.np_random)
        text = f"{self._shop.schema}\n{self._task.question}\n{_HOW_TO}"
        return printable(text, self._max_chars + 1000), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A query or the answer. Raises ResetNeeded before a reset and after the end."""
        if self._shop is None or self._task is None:
            raise gymnasium.error.ResetNeeded("reset the database before a step")
        self._num_steps += 1
        reply = action[:_MAX_REPLY]
        answer = answer_in(reply)
        reward, terminated, valid_action = 0.0, answer is not None, True
        if answer is not None:
            right = self._task.accepts(answer)
            reward = float(right)
            text = "Right." if right else "Wrong."
        else:
            text, valid_action = self._ask(code_in(reply, "sql"))
        truncated = not terminated and self._num_steps >= self._max_steps
        if terminated or truncated:
            self.close()
        return text, reward, terminated, truncated, {"valid_action": valid_action}

    def close(self) -> None:
        """Forget the database; may be called twice."""
        if self._shop is not None:
            self._shop.close()
        self._shop = self._task = None

    def _ask(self, sql: str) -> tuple[str, bool]:
        assert self._shop is not None
        if not sql.strip():
            return _HOW_TO, False
        try:
            columns, rows = self._shop.query(sql, self._max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            # ValueError: NUL characters and lone surrogates, which are no SQL.
            return printable(f"Error: {error}", self._max_chars), False
        if not columns:
            return _HOW_TO, False
        lines = [" | ".join(columns)]
        lines += [" | ".join(map(_cell, row)) for row in rows[: self._max_rows]]
        if len(rows) > self._max_rows:
            lines.append(f"(more than {self._max_rows} rows)")
        elif not rows:
            lines.append("(no rows)")
        return printable("\n".join(lines), self._max_chars), True


def _cell(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value[:64].hex()}'"
    return str(value).replace("\n", " ")
