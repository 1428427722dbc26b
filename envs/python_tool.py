"""A tool environment: compute with Python, in a process that may do anything but last too long."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from gymnasium import spaces

from interlace.envs.computing import KINDS, draw
from interlace.envs.python_process import PythonProcess, Run
from interlace.envs.replies import answer_in, code_in, prose_in
from interlace.envs.task import Task
from interlace.envs.text import printable, text_space

_MAX_REPLY = 16_384
_HOW_TO = "Send Python code to see what it prints, or reply ANSWER: followed by the answer."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PythonTool(gymnasium.Env[str, str]):
    """Answer a generated question with the help of Python; code is free, the answer counts.

    A reply with a line `ANSWER: x` outside fenced blocks ends the episode with reward 1 if x is
    right and 0 if not. Any other reply is code: the first fenced block, else the whole text. The
    observation is what it prints, the value of a last expression and tracebacks included. Names
    persist from step to step. Code that takes more than `timeout_s` seconds is killed with all it
    had defined; the observation says so, `info["outcome"]` is "timed out", and the next code finds
    a fresh process. Truncated after `max_steps`.

    The code has the rights of the environment's process and no secrets in its variables (see
    `PythonProcess`). It decides whether an episode can be repeated: what prints times, random
    bytes or process ids cannot, and neither can what takes about `timeout_s`. It cannot be copied;
    a fork is replayed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 -- gymnasium declares it so
    observation_space: spaces.Space[str]
    action_space: spaces.Space[str]

    def __init__(
        self,
        *,
        max_steps: int = 8,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        max_chars: int = 1000,
        kinds: tuple[str, ...] | list[str] = KINDS,
    ) -> None:
        """`max_chars` of what one piece of code prints are shown; `kinds` of question are those of
        `interlace.envs.computing.KINDS`. `timeout_s` belongs below the pool's deadline for a step.

        Raises ValueError for a number that is too small and for unknown kinds.
        """
        for name, value, least in (
            ("max_steps", max_steps, 1),
            ("memory_mb", memory_mb, 64),
            ("max_chars", max_chars, 20),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        self.observation_space = text_space(max_chars + 1000)
        self.action_space = text_space(4096)
        self._max_steps = max_steps
        self._timeout_s = timeout_s
        self._memory_bytes = memory_mb * 1024**2
        self._max_chars = max_chars
        self._kinds = tuple(kinds)
        self._num_steps = 0
        self._task: Task | None = None
        self._python: PythonProcess | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new question, and a process in which nothing is defined; both from the seed."""
        super().reset(seed=seed)
        self.close()
        self._num_steps = 0
        self._task = draw(self.np_random, self._kinds)
        self._python = PythonProcess(
            seed=int(self.np_random.integers(2**31)),
            timeout_s=self._timeout_s,
            memory_bytes=self._memory_bytes,
            max_bytes=self._max_chars,
        )
        return printable(f"{self._task.question}\n{_HOW_TO}", self._max_chars + 1000), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Code or the answer. Raises ResetNeeded before a reset and after the end."""
        if self._task is None or self._python is None:
            raise gymnasium.error.ResetNeeded("reset the Python tool before a step")
        self._num_steps += 1
        reply = action[:_MAX_REPLY]
        answer = answer_in(prose_in(reply))
        reward, terminated = 0.0, answer is not None
        info: dict[str, Any] = {"valid_action": True}
        if answer is not None:
            right = self._task.accepts(answer)
            reward, text = float(right), "Right." if right else "Wrong."
            info["success"] = right
        else:
            run = self._python.run(code_in(reply, "python", "py", "python3"))
            text = self._shown(run)
            info = {"valid_action": run.outcome != "no code", "outcome": run.outcome}
        truncated = not terminated and self._num_steps >= self._max_steps
        if terminated or truncated:
            self.close()
        return text, reward, terminated, truncated, info

    def close(self) -> None:
        """End the process and forget the question; may be called twice."""
        if self._python is not None:
            self._python.close()
        self._python = self._task = None

    def _shown(self, run: Run) -> str:
        # Addresses differ from run to run and would make a replay differ.
        text = printable(_ADDRESS.sub(" at 0x...", run.output).strip(), self._max_chars)
        if run.outcome == "timed out":
            note = f"(stopped after {self._timeout_s:g} s; what was defined is gone)"
        elif run.outcome == "ended":
            note = "(the process ended; what was defined is gone)"
        elif run.outcome == "no code" and not text:
            note = _HOW_TO
        else:
            note = "" if text else "(nothing printed)"
        return f"{text}\n{note}".strip()
