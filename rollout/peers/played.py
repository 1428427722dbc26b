"""What came of a phase, and the figures that are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .scripts import Said, Script
from .workload import ROLLOUT, Phase, Shape, decode_phase, prefill_phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPhase:
    """Seconds by the clock of all processes of this machine."""

    name: str
    began_at: float
    ended_at: float
    cpu_s: float
    """Of all processes that had part in it."""
    said: list[list[Said]]
    """Of every script, in their order, what its turns said."""

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


def figures(shape: Shape, phases: Sequence[Phase], played: Sequence[PlayedPhase]) -> dict[str, Any]:
    """Of one run, as JSON values: completion, CPU, rates, and the tokens of the rollout.

    ValueError if a phase was not played, or a turn has another length than its script says.
    """
    found = {one.name: one for one in played}
    missing = [phase.name for phase in phases if phase.name not in found]
    if missing:
        raise ValueError(f"phase {missing[0]} was not played")
    for phase in phases:
        _check(phase.scripts, found[phase.name])
    scripts = {phase.name: phase.scripts for phase in phases}
    rollout = found[ROLLOUT]
    tokens = [[token for turn in turns for token in turn.tokens] for turns in rollout.said]
    return {
        "completion_s": rollout.seconds,
        "cpu_s": rollout.cpu_s,
        "prefill_tokens_per_s": {
            str(batch): prefill_rate(scripts[prefill_phase(batch)], found[prefill_phase(batch)])
            for batch in shape.batches
        },
        "decode_tokens_per_s": {
            str(batch): decode_rate(found[decode_phase(batch)]) for batch in shape.batches
        },
        "num_tokens": sum(len(one) for one in tokens),
        "tokens": tokens,
    }


def prefill_rate(scripts: Sequence[Script], phase: PlayedPhase) -> float:
    """Prompt tokens a second until each prompt has its first token."""
    return sum(len(script.prompt) for script in scripts) / phase.seconds


def decode_rate(phase: PlayedPhase) -> float | None:
    """Tokens a second while all turns decode: from the last first token to the first last one.

    None if there is no such time.
    """
    turns = [turn for script in phase.said for turn in script]
    begin = max(turn.times[0] for turn in turns)
    end = min(turn.times[-1] for turn in turns)
    if end <= begin:
        return None
    num = sum(begin < at <= end for turn in turns for at in turn.times)
    return num / (end - begin)


def _check(scripts: Sequence[Script], phase: PlayedPhase) -> None:
    if len(phase.said) != len(scripts):
        raise ValueError(
            f"phase {phase.name}: {len(phase.said)} trajectories were played, {len(scripts)} asked"
        )
    for script, turns in zip(scripts, phase.said, strict=True):
        if len(turns) != script.num_turns:
            raise ValueError(f"{script.name} has {len(turns)} turns, not {script.num_turns}")
        for turn in turns:
            if not len(turn.tokens) == len(turn.times) == script.num_generated:
                raise ValueError(
                    f"{script.name}: a turn has {len(turn.tokens)} tokens and {len(turn.times)} "
                    f"times, {script.num_generated} were asked for"
                )


def equal_tokens(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Mapping[str, int]:
    """Tokens of two runs, position by position: how many are `equal`, and how many of these stand
    before the first that differs in their trajectory (`before_first_difference`)."""
    equal = leading = 0
    for first, second in zip(one, other, strict=True):
        same = [a == b for a, b in zip(first, second, strict=True)]
        equal += sum(same)
        leading += same.index(False) if False in same else len(same)
    return {"equal": equal, "before_first_difference": leading}
