"""A trajectory in the making: what has been given to the model, and what it has said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .chat import Rendered
from .messages import TurnResult
from .partial import Past, unfinished
from .tasks import Task
from .trajectory import EndReason, Ledger, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the model, whole; its tokens are in the ledger."""

    token_ids: list[int]
    start: int
    """Where its first token stands in the ledger."""
    finish: str
    cached_tokens: int
    prefill_tokens: int


class Episode:
    """Grows a ledger and its turns. One with a past first repeats that, token by token.

    What the past had sampled goes into the ledger as it was recorded; what is given again must be
    what was given then (EnvironmentFailure).
    """

    def __init__(
        self, trajectory_id: int, task: Task, leader: int, past: Trajectory | None
    ) -> None:
        """`leader`: whose ranks play it."""
        self.trajectory_id, self.task, self.leader = trajectory_id, task, leader
        self.ledger = Ledger()
        self.turns: list[Turn] = []
        self.info: dict[str, Any] = {}
        self._past = None if past is None else Past(past)
        self._num_sampled = 0

    # ---- what is ahead

    @property
    def begun(self) -> Turn | None:
        """The coming turn as far as it was sampled before it was aborted."""
        return None if self._past is None else self._past.begun(len(self.turns))

    @property
    def context(self) -> list[int]:
        """What stands before the next token that is sampled."""
        begun = self.begun
        if self._past is None or begun is None:
            return self.ledger.token_ids
        return [*self.ledger.token_ids, *self._past.tokens(begun)]

    @property
    def num_begun(self) -> int:
        """The last so many tokens of the context were sampled in the coming turn."""
        return 0 if self.begun is None else self.begun.stop - self.begun.start

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of the context."""
        return self._num_sampled + self.num_begun

    @property
    def num_with_experts(self) -> int:
        """Of the context, those whose experts are recorded."""
        num = self.ledger.num_with_experts
        if self._past is None or self.begun is None:
            return num
        return max(num, min(self._past.trajectory.experts_known, self.begun.stop))

    @property
    def is_behind(self) -> bool:
        """Whether the past went on from here."""
        return self._past is not None and len(self.ledger) < self._past.trajectory.num_tokens

    # ---- growth

    def give(self, rendered: Rendered) -> None:
        """Append tokens that nobody sampled and that lead to the next turn."""
        if self._past is not None:
            self._past.check_given(len(self.ledger), rendered.token_ids)
        self.ledger.append_given(rendered.token_ids, rendered.sources, len(self.turns))
        if self._past is not None:
            self._past.copy_experts(self.ledger)

    def recall(self) -> Answer | None:
        """The next turn, if the past has all of it: it is in the ledger now."""
        turn = None if self._past is None else self._past.turn(len(self.turns))
        if self._past is None or turn is None:
            return None
        self._past.copy_sampled(turn, self.ledger)
        self._past.copy_experts(self.ledger)
        self._num_sampled += turn.stop - turn.start
        return Answer(
            token_ids=self._past.tokens(turn),
            start=turn.start,
            finish=turn.finish,
            cached_tokens=turn.cached_tokens,
            prefill_tokens=turn.prefill_tokens,
        )

    def hear(self, result: TurnResult) -> Answer:
        """Append what a turn has sampled, behind what it had before it was aborted."""
        ledger, begun, start = self.ledger, self.begun, len(self.ledger)
        said: list[int] = []
        if self._past is not None and begun is not None:
            said = self._past.tokens(begun)
            self._past.copy_sampled(begun, ledger)
            self._past.copy_experts(ledger)
        ledger.append_sampled(
            result.token_ids,
            result.logprobs_raw,
            result.logprobs,
            result.versions,
            result.kv_versions,
            len(self.turns),
        )
        experts = np.frombuffer(result.experts, np.uint8).reshape(result.experts_shape)
        ledger.set_experts(ledger.num_with_experts, experts)
        said += result.token_ids
        self._num_sampled += len(said)
        return Answer(
            token_ids=said,
            start=start,
            finish=result.finish,
            cached_tokens=result.cached_tokens if begun is None else begun.cached_tokens,
            prefill_tokens=result.prefill_tokens + (0 if begun is None else begun.prefill_tokens),
        )

    def end_turn(
        self, answer: Answer, text: str, *, reward: float = 0.0, valid_action: bool | None = None
    ) -> None:
        """The turn is over, and this is what it led to."""
        self.turns.append(
            Turn(
                reward=reward,
                start=answer.start,
                stop=len(self.ledger),
                finish=answer.finish,
                valid_action=valid_action,
                text=text,
                cached_tokens=answer.cached_tokens,
                prefill_tokens=answer.prefill_tokens,
            )
        )

    def check_end(self) -> None:
        """The environment has ended: EnvironmentFailure if it had not, the first time."""
        if self._past is not None and self.is_behind:
            raise self._past.differs(len(self.turns), "episode is over, and it went on")

    def trajectory(self, end_reason: EndReason) -> Trajectory:
        """Close the ledger; nothing of the past is lost, however far it was repeated."""
        task, info = self.task, dict(self.info)
        if end_reason is EndReason.ABORTED:
            info.update(unfinished(task))
        if self._past is not None and self.is_behind:
            info = {**self._past.info, **info}
            return replace(self._past.trajectory, end_reason=end_reason, info=info)
        return Trajectory.from_ledger(
            self.ledger,
            trajectory_id=self.trajectory_id,
            task_id=task.task_id,
            group_id=task.group_id,
            env=task.env,
            seed=task.seed,
            turns=tuple(self.turns),
            end_reason=end_reason,
            info=info,
            prompt=task.prompt,
            answer=task.answer,
        )
