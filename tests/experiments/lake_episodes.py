"""Episodes on the lake written by hand, for tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from interlace.experiments.grpo.lake_model import ACTIONS, VOCABULARY, action_choices
from interlace.rollout import EndReason, Source, Trajectory, Turn
from interlace.rollout.trajectory import Ledger

LAYERS, TOP_K = 2, 2
OPENING = (3, 2, 9)
OBSERVATION = (2, 10, 13, 2)


def episode(
    number: int,
    actions: Sequence[str],
    *,
    reward: float = 0.0,
    versions: Sequence[int] = (),
    kv_versions: Sequence[int] = (),
    group: str = "lake",
) -> Trajectory:
    """Every turn says one of `actions`; `versions` name one version a turn, by default 0."""
    spelled = dict(zip(ACTIONS, action_choices(), strict=True))
    ledger, turns = Ledger(), []
    ledger.append_given(OPENING, Source.PROMPT, 0)
    for place, action in enumerate(actions):
        if place:
            ledger.append_given(OBSERVATION, Source.OBSERVATION, place)
        start, tokens = len(ledger), spelled[action]
        version = versions[place] if versions else 0
        kv_version = kv_versions[place] if kv_versions else version
        ledger.append_sampled(
            tokens,
            [-3.0, -2.0],
            [float(np.log(0.25)), 0.0],
            [version] * 2,
            [kv_version] * 2,
            place,
        )
        last = place + 1 == len(actions)
        turns.append(
            Turn(
                reward=reward if last else 0.0,
                start=start,
                stop=len(ledger),
                finish="choice",
                valid_action=True,
                text=action,
                cached_tokens=0,
                prefill_tokens=0,
            )
        )
    known = len(ledger) - 1
    experts = np.arange(known * LAYERS * TOP_K).reshape(known, LAYERS, TOP_K) % 4
    ledger.set_experts(0, experts.astype(np.uint8))
    return Trajectory.from_ledger(
        ledger,
        trajectory_id=number,
        task_id="lake",
        group_id=group,
        env="frozen_lake",
        seed=0,
        turns=tuple(turns),
        end_reason=EndReason.TERMINATED,
        info={},
    )


def words(token_ids: Sequence[int]) -> str:
    """What tokens of the lake's vocabulary say."""
    return "".join(VOCABULARY[token] for token in token_ids)
