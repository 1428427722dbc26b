"""The work of a comparison, for every engine the same tokens at the same times.

An environment of scripts says what is given and when; its texts become tokens once, here, through
the model's chat template. Interlace plays the tasks, with the environment in a process of its own;
others are given the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from interlace.envs.scripted import Scripted
from interlace.rollout.chat import Chat
from interlace.rollout.tasks import Task

from .scripts import Script

ROLLOUT = "rollout"
_NUM_WARM, _WARM_TOKENS = 4, 8
_DECODE_PROMPT, _DECODE_TOKENS = 64, 65


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the rollout. Lengths are in tokens, what the chat template writes included."""

    num_trajectories: int = 32
    num_turns: int = 4
    num_prompt: int = 384
    num_appended: int = 96
    num_generated: int = 48
    longest_wait_s: float = 0.5
    """Every turn waits up to so long before it is asked, uniformly."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sizes at which prefill and decode are measured alone."""
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "batches": list(self.batches)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Shape:
        return cls(**{**values, "batches": tuple(values["batches"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Work that begins at once and is measured as a whole: `tasks` and `scripts` are the same."""

    name: str
    tasks: tuple[Task, ...]
    scripts: tuple[Script, ...]


def prefill_phase(batch: int) -> str:
    """The name of the phase that measures prefill with so many prompts."""
    return f"prefill-{batch}"


def decode_phase(batch: int) -> str:
    """The same for decode."""
    return f"decode-{batch}"


def phases(shape: Shape, chat: Chat) -> list[Phase]:
    """A warm-up, prefill and decode alone at every batch size, then the rollout."""
    made = [_phase("warm-up", _plain(shape, _NUM_WARM, shape.num_prompt, _WARM_TOKENS), 0, chat)]
    for number, batch in enumerate(shape.batches):
        prefill = _plain(shape, batch, shape.num_prompt, 1)
        decode = _plain(shape, batch, _DECODE_PROMPT, _DECODE_TOKENS)
        made.append(_phase(prefill_phase(batch), prefill, 2 * number + 1, chat))
        made.append(_phase(decode_phase(batch), decode, 2 * number + 2, chat))
    return [*made, _phase(ROLLOUT, shape, len(made), chat)]


def _plain(shape: Shape, num: int, num_prompt: int, num_generated: int) -> Shape:
    """So many single turns without waits."""
    return replace(
        shape,
        num_trajectories=num,
        num_turns=1,
        num_prompt=num_prompt,
        num_generated=num_generated,
        longest_wait_s=0.0,
    )


def _phase(name: str, shape: Shape, number: int, chat: Chat) -> Phase:
    tasks = _tasks(name, shape, number, chat)
    scripts = [_script(task, f"{name}-{index}", chat) for index, task in enumerate(tasks)]
    return Phase(name=name, tasks=tuple(tasks), scripts=tuple(scripts))


def _tasks(name: str, shape: Shape, number: int, chat: Chat) -> list[Task]:
    """Texts shorter by what the template writes around them. No two prompts begin alike, nor do
    those of two phases."""
    prompt = shape.num_prompt - len(chat.open([_user("x")]).token_ids) + 1
    appended = shape.num_appended - len(chat.reply("x", closed=False).token_ids) + 1
    if prompt < 1 or appended < 1:
        raise ValueError(
            f"prompts of {shape.num_prompt} and observations of {shape.num_appended} tokens leave "
            "no room for a text: the chat template alone is longer"
        )
    random = np.random.default_rng([shape.seed, number])
    tasks = []
    for index in range(shape.num_trajectories):
        waits = random.uniform(0.0, shape.longest_wait_s, shape.num_turns).round(6).tolist()
        params = {
            "prompt": [[(shape.seed * 100 + number) * 10_000 + index, prompt]],
            "turns": [[shape.num_generated, appended, wait, 0] for wait in (*waits[1:], 0.0)],
            "reset_s": waits[0],
        }
        tasks.append(Task("scripted", seed=index, params=params, task_id=f"{name}-{index}"))
    return tasks


def _script(task: Task, name: str, chat: Chat) -> Script:
    """What the environment will say, as tokens."""
    environment = Scripted(**task.params)
    text, info = environment.reset(seed=task.seed)
    prompt = chat.open([_user(text)]).token_ids
    num_generated = int(info["num_tokens"])
    observations, waits = list[list[int]](), [_wait(info)]
    while True:
        text, _, ended, _, info = environment.step("")
        if ended:
            break
        observations.append(chat.reply(text, closed=False).token_ids)
        waits.append(_wait(info))
    return Script(
        name=name,
        prompt=prompt,
        observations=observations,
        waits_s=waits,
        num_generated=num_generated,
    )


def max_context(phases: Sequence[Phase]) -> int:
    """The longest of all scripts at its end."""
    return max(script.num_context for phase in phases for script in phase.scripts)


def _wait(info: dict[str, Any]) -> float:
    return float(info.get("wait_s", 0.0))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
