"""Trajectories that were aborted, and what is needed to go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .environment_room import EnvironmentFailure
from .tasks import PROMPT_ENV, Task
from .trajectory import EndReason, Ledger, Source, Trajectory, Turn

UNFINISHED = "unfinished"
"""Key in the info of an aborted trajectory: what of its task the trajectory says nowhere else."""


def unfinished(task: Task) -> dict[str, Any]:
    """What to keep in the info of a trajectory of `task` that ends before its end."""
    return {UNFINISHED: {"params": dict(task.params), "max_tokens": task.max_tokens}}


def task_of(trajectory: Trajectory) -> Task:
    """The task a trajectory is of; for a finished one, without what only playing needs.

    ValueError if an aborted one does not say.
    """
    played: Mapping[str, Any] = {"params": {}, "max_tokens": None}
    kept = played if is_finished(trajectory) else trajectory.info.get(UNFINISHED)
    if not isinstance(kept, Mapping):
        raise ValueError(
            f"trajectory {trajectory.trajectory_id} was aborted, and its info has no "
            f"{UNFINISHED!r}: it does not say what task it was of, so it cannot be resumed"
        )
    return Task(
        trajectory.env,
        seed=trajectory.seed,
        params=kept["params"],
        group_id=trajectory.group_id,
        prompt=trajectory.prompt,
        answer=trajectory.answer,
        max_tokens=kept["max_tokens"],
        task_id=trajectory.task_id,
    )


def is_finished(trajectory: Trajectory) -> bool:
    """Whether nothing of it is left to play."""
    return trajectory.end_reason is not EndReason.ABORTED


class Past:
    """What a trajectory had come to when it was aborted, given out again piece by piece.

    Whoever plays it again does as at first, with turns from here as long as they last, and
    compares what is given (prompt, observations) with what was given then.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory

    @property
    def info(self) -> dict[str, Any]:
        """What was known of it that is true however it ends."""
        return {name: value for name, value in self.trajectory.info.items() if name != UNFINISHED}

    def check_given(self, start: int, token_ids: list[int]) -> None:
        """EnvironmentFailure unless these stood at `start` the first time, or nothing did."""
        past = self.trajectory
        if start >= past.num_tokens:
            return
        sampled = past.source[start:] == Source.SAMPLED
        stop = start + int(sampled.argmax()) if sampled.any() else past.num_tokens
        if past.token_ids[start:stop].tolist() == token_ids:
            return
        if past.env == PROMPT_ENV:
            raise EnvironmentFailure(
                "invalid",
                f"it was to be resumed, and its prompt has {len(token_ids)} other tokens than the "
                f"{stop - start} recorded: has the tokenizer or the chat template changed?",
            )
        num_turns = sum(turn.stop <= start for turn in past.turns)
        raise self.differs(num_turns, "observation differs from the one recorded")

    def differs(self, num_turns: int, what: str) -> EnvironmentFailure:
        """The replay of so many turns has come out different."""
        past = self.trajectory
        return EnvironmentFailure(
            "died",
            f"it was to be resumed by replaying its actions, and {past.env} is not reproducible: "
            f"after seed {past.seed} and the same {num_turns} actions its {what}",
        )

    def turn(self, index: int) -> Turn | None:
        """The turn of that index, if it was sampled to its end."""
        turns = self.trajectory.turns
        return turns[index] if index < len(turns) and turns[index].finish != "aborted" else None

    def begun(self, index: int) -> Turn | None:
        """The turn of that index, if the abort cut it in two."""
        turns = self.trajectory.turns
        cut = index < len(turns) and turns[index].finish == "aborted"
        return turns[index] if cut and turns[index].stop > turns[index].start else None

    def tokens(self, turn: Turn) -> list[int]:
        """What was sampled in a turn of it."""
        sampled: list[int] = self.trajectory.token_ids[turn.start : turn.stop].tolist()
        return sampled

    def copy_sampled(self, turn: Turn, ledger: Ledger) -> None:
        """Append what was sampled in `turn`, as it was recorded, to a ledger that ends there."""
        past, span = self.trajectory, slice(turn.start, turn.stop)
        assert len(ledger) == turn.start, f"turn at {turn.start}, ledger ends at {len(ledger)}"
        ledger.append_sampled(
            past.token_ids[span].tolist(),
            past.logprob_raw[span].tolist(),
            past.logprob[span].tolist(),
            past.version[span].tolist(),
            past.kv_version[span].tolist(),
            int(past.turn[turn.start]),
        )

    def copy_experts(self, ledger: Ledger) -> None:
        """Record the experts of the ledger's tokens, as far as they were known."""
        start = ledger.num_with_experts
        stop = min(self.trajectory.experts_known, len(ledger))
        if stop > start:
            ledger.set_experts(start, self.trajectory.experts[start:stop])
