"""Plays episodes: turns of the model and steps of an environment alternate into one ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from interlace.moe.sampler import validate
from interlace.moe.sampling_params import SamplingParams

from .balancer import Balancer
from .chat import Chat
from .environments import EnvironmentFailure, EnvironmentPool
from .messages import TurnRequest, TurnResult
from .tasks import Task
from .trajectory import EndReason, Ledger, Source, Trajectory, Turn
from .turns import TurnAborted, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the ranks said they can hold."""

    max_context: int
    pool_tokens: int
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class _Episode:
    """A trajectory in the making."""

    trajectory_id: int
    task: Task
    leader: int
    ledger: Ledger = field(default_factory=Ledger)
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


class Collector:
    """One call of `play` per trajectory, any number at once, all in one event loop."""

    def __init__(
        self,
        *,
        chat: Chat,
        turns: Turns,
        pool: EnvironmentPool,
        balancer: Balancer,
        limits: Limits,
        sampling: SamplingParams,
        max_turns: int | None,
        seed: int,
    ) -> None:
        self._chat, self._turns, self._pool, self._balancer = chat, turns, pool, balancer
        self._limits, self._sampling = limits, sampling
        self._max_turns, self._seed = max_turns, seed

    async def play(self, trajectory_id: int, task: Task) -> Trajectory:
        """The finished trajectory, whatever became of its environment.

        Raises RolloutError when a rank fails; an environment's failure only ends its trajectory.
        """
        leader = self._balancer.place(task.group_id)
        episode = _Episode(trajectory_id=trajectory_id, task=task, leader=leader)
        try:
            if task.prompt is not None:
                end_reason = await self._answer(episode)
            else:
                end_reason = await self._interact(episode)
        except EnvironmentFailure as failure:
            episode.info.update(error=str(failure), failure=failure.kind)
            end_reason = EndReason.ENVIRONMENT_ERROR
        except TurnAborted:
            end_reason = EndReason.ABORTED
        finally:
            self._balancer.leave(leader)
        return Trajectory.from_ledger(
            episode.ledger,
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            group_id=task.group_id,
            env=task.env,
            seed=task.seed,
            turns=tuple(episode.turns),
            end_reason=end_reason,
            info=episode.info,
            prompt=task.prompt,
            answer=task.answer,
        )

    async def _answer(self, episode: _Episode) -> EndReason:
        prompt = episode.task.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        assert prompt is not None
        if isinstance(prompt[0], int):
            token_ids = [token for token in prompt if isinstance(token, int)]
            self._check_ids(token_ids)
            episode.ledger.append_given(token_ids, Source.PROMPT, 0)
        else:
            rendered = self._chat.open([m for m in prompt if isinstance(m, Mapping)])
            episode.ledger.append_given(rendered.token_ids, rendered.sources, 0)
        self._check_opening(episode)
        result = await self._generate(episode, {})
        self._record(episode, result, reward=0.0, valid_action=None)
        if result.finish == "aborted":
            return EndReason.ABORTED
        return EndReason.MAX_TOKENS if result.finish == "length" else EndReason.TERMINATED

    async def _interact(self, episode: _Episode) -> EndReason:
        task = episode.task
        async with await self._pool.open(task.env, dict(task.params), task.seed) as environment:
            observation = await environment.reset()
            info: Mapping[str, Any] = observation.info
            rendered = self._chat.open(_opening(observation.text, info))
            episode.ledger.append_given(rendered.token_ids, rendered.sources, 0)
            self._check_opening(episode)
            while True:
                result = await self._generate(episode, info)
                if result.finish == "aborted":
                    self._record(episode, result, reward=0.0, valid_action=None)
                    return EndReason.ABORTED
                try:
                    outcome = await environment.step(self._chat.decode(result.token_ids))
                except EnvironmentFailure:
                    self._record(episode, result, reward=0.0, valid_action=None)
                    raise
                info = outcome.info
                valid = info.get("valid_action")
                self._record(episode, result, reward=outcome.reward, valid_action=valid)
                episode.info.update(_kept(info))
                if outcome.terminated:
                    return EndReason.TERMINATED
                if outcome.truncated or len(episode.turns) == self._max_turns:
                    return EndReason.TRUNCATED
                closed = result.token_ids[-1] in self._chat.end_of_turn_ids
                reply = self._chat.reply(outcome.text, closed=closed)
                if not self._fits(len(episode.ledger) + len(reply.token_ids)):
                    return EndReason.MAX_TOKENS
                episode.ledger.append_given(reply.token_ids, reply.sources, len(episode.turns))

    async def _generate(self, episode: _Episode, info: Mapping[str, Any]) -> TurnResult:
        request = TurnRequest(
            trajectory=episode.trajectory_id,
            turn=len(episode.turns),
            token_ids=episode.ledger.token_ids,
            seed=self._seed,
            experts_from=episode.ledger.num_with_experts,
            sampling=self._params(episode.task, info, len(episode.ledger)),
        )
        return await self._turns.generate(episode.leader, request)

    def _params(self, task: Task, info: Mapping[str, Any], num_context: int) -> SamplingParams:
        """The job's sampling with what the environment allows, or prescribes, in this turn."""
        params = self._sampling
        if task.max_tokens is not None:
            params = replace(params, max_tokens=task.max_tokens)
        choices: Sequence[str] = info.get("choices") or ()
        if choices:
            spelled = tuple(tuple(self._chat.encode_choice(text)) for text in choices)
            longest = max(map(len, spelled)) + 1
            params = replace(params, choices=spelled, max_tokens=max(params.max_tokens, longest))
        allowed: Sequence[int] = info.get("allowed_token_ids") or ()
        if allowed:
            params = replace(params, allowed_token_ids=tuple(sorted(set(allowed))))
        num_tokens: int | None = info.get("num_tokens")
        if num_tokens is not None:
            if choices:
                raise EnvironmentFailure("invalid", "choices and num_tokens exclude each other")
            self._check_room(num_context, num_tokens)
            params = replace(params, max_tokens=num_tokens, stop_token_ids=(), stop_strings=())
        try:
            validate(params, self._limits.vocab_size)
        except ValueError as error:
            raise EnvironmentFailure("invalid", str(error)) from error
        return params

    def _record(
        self, episode: _Episode, result: TurnResult, *, reward: float, valid_action: bool | None
    ) -> None:
        ledger, start = episode.ledger, len(episode.ledger)
        ledger.append_sampled(
            result.token_ids,
            result.logprobs_raw,
            result.logprobs,
            result.versions,
            result.kv_versions,
            len(episode.turns),
        )
        experts = np.frombuffer(result.experts, np.uint8).reshape(result.experts_shape)
        ledger.set_experts(ledger.num_with_experts, experts)
        episode.turns.append(
            Turn(
                reward=reward,
                start=start,
                stop=len(ledger),
                finish=result.finish,
                valid_action=valid_action,
                text=self._chat.decode(result.token_ids),
                cached_tokens=result.cached_tokens,
                prefill_tokens=result.prefill_tokens,
            )
        )

    def _fits(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens leaves room to sample at least one."""
        return num_tokens < min(self._limits.max_context, self._limits.pool_tokens)

    def _check_opening(self, episode: _Episode) -> None:
        num = len(episode.ledger)
        if not self._fits(num):
            raise EnvironmentFailure(
                "invalid",
                f"the prompt has {num} tokens; the context holds {self._limits.max_context} and "
                f"the KV pool {self._limits.pool_tokens}: shorten it, or raise model.max_context "
                "or scheduler.num_blocks",
            )

    def _check_room(self, num_context: int, num_tokens: int) -> None:
        """A prescribed turn is generated as a whole or not at all."""
        room = min(self._limits.max_context, self._limits.pool_tokens)
        if num_context + num_tokens > room:
            raise EnvironmentFailure(
                "invalid",
                f"a turn of {num_tokens} tokens is prescribed behind {num_context}; the context "
                f"holds {self._limits.max_context} and the KV pool {self._limits.pool_tokens}: "
                "prescribe less, or raise model.max_context or scheduler.num_blocks",
            )

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        vocab = self._limits.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise EnvironmentFailure(
                "invalid", f"token id {wrong} is outside the vocabulary of {vocab}"
            )


def _opening(text: str, info: Mapping[str, Any]) -> list[dict[str, str]]:
    """The first messages: the environment's system prompt, if it has one, and its observation."""
    user = {"role": "user", "content": text}
    system = info.get("system_prompt")
    return [{"role": "system", "content": system}, user] if isinstance(system, str) else [user]


def _kept(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step's info is worth keeping with the trajectory."""
    per_turn = (
        *("choices", "allowed_token_ids", "num_tokens", "wait_s"),
        *("valid_action", "system_prompt"),
    )
    return {key: value for key, value in info.items() if key not in per_turn}
