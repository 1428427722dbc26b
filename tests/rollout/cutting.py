"""Trajectories as they would be, had they been aborted earlier."""

from __future__ import annotations

from dataclasses import replace

from interlace.rollout.partial import unfinished
from interlace.rollout.tasks import Task
from interlace.rollout.trajectory import EndReason, Trajectory


def cut(whole: Trajectory, task: Task, num_tokens: int) -> Trajectory:
    """The first tokens of a finished trajectory, as an abort at that point would have left it."""
    turns = [turn for turn in whole.turns if turn.stop <= num_tokens]
    if len(turns) < len(whole.turns):
        cut_in_two = whole.turns[len(turns)]
        if cut_in_two.start <= num_tokens:
            turns.append(replace(cut_in_two, stop=num_tokens, finish="aborted", reward=0.0))
    columns = {
        name: getattr(whole, name)[:num_tokens].copy()
        for name in (
            *("token_ids", "source", "turn", "logprob_raw", "logprob"),
            *("version", "kv_version", "experts"),
        )
    }
    return replace(
        whole,
        **columns,
        turns=tuple(turns),
        experts_known=max(0, min(whole.experts_known, num_tokens - 1)),
        end_reason=EndReason.ABORTED,
        info=unfinished(task),
    )
