"""Trajectories whose every token but the sampled ones is fixed, and how an engine plays them.

Runs inside the environments of other engines: the standard library is all there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One trajectory: what it is given, and how much it has to say."""

    name: str
    """Unlike that of any other script of a run."""
    prompt: list[int]
    observations: list[list[int]]
    """The tokens between each turn and the next."""
    waits_s: list[float]
    """Seconds before each turn."""
    num_generated: int
    """Tokens of every turn: no more, no fewer."""

    @property
    def num_turns(self) -> int:
        return len(self.observations) + 1

    @property
    def num_context(self) -> int:
        """Tokens at its end."""
        given = len(self.prompt) + sum(len(one) for one in self.observations)
        return given + self.num_turns * self.num_generated

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Script:
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The tokens of one turn, and when each of them was seen, by `time.monotonic`."""

    tokens: list[int]
    times: list[float]


class Engine(Protocol):
    """Generates greedily, many turns at once, token ids in and out."""

    async def turn(self, name: str, context: Sequence[int], num: int, *, last: bool) -> Said:
        """`num` tokens behind `context`, which begins with what the trajectory `name` had before
        it; `last`: nothing more will come of it."""
        ...

    def close(self) -> None: ...


async def play(engine: Engine, scripts: Sequence[Script]) -> list[list[Said]]:
    """All scripts at once; what each of their turns said, in the order given.

    ValueError if a turn has more or fewer tokens than its script says.
    """
    return list(await asyncio.gather(*(_play_one(engine, script) for script in scripts)))


async def _play_one(engine: Engine, script: Script) -> list[Said]:
    context, turns = list(script.prompt), list[Said]()
    for number, wait_s in enumerate(script.waits_s):
        if wait_s:
            await asyncio.sleep(wait_s)
        last = number == len(script.observations)
        said = await engine.turn(script.name, context, script.num_generated, last=last)
        if len(said.tokens) != script.num_generated:
            raise ValueError(
                f"{script.name}, turn {number}: the engine gave {len(said.tokens)} tokens, "
                f"{script.num_generated} were asked for"
            )
        turns.append(said)
        if not last:
            context += [*said.tokens, *script.observations[number]]
    return turns


def now() -> float:
    """The clock of `Said.times`: one for all processes of a machine."""
    return time.monotonic()
