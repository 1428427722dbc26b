"""Plays episodes: turns of the model and steps of an environment alternate into one ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from interlace.moe.sampler import validate
from interlace.moe.sampling_params import SamplingParams

from .balancer import Balancer
from .chat import Chat, Rendered
from .environments import EnvironmentFailure, EnvironmentPool
from .episode import Answer, Episode
from .messages import TurnRequest
from .tasks import Prompt, Task
from .trajectory import EndReason, Source, Trajectory
from .turns import RolloutError, TurnAborted, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the ranks said they can hold."""

    max_context: int
    pool_tokens: int
    vocab_size: int


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

    async def play(
        self, trajectory_id: int, task: Task, past: Trajectory | None = None
    ) -> Trajectory:
        """The finished trajectory, whatever became of its environment.

        `past`: what it had come to when it was aborted; it goes on from there. When a rank fails it
        ends as aborted with the turns that had ended; an environment's failure ends it as that.
        """
        leader = self._balancer.place(task.group_id)
        episode = Episode(trajectory_id, task, leader, past)
        try:
            if task.prompt is not None:
                end_reason = await self._answer(episode, task.prompt)
            else:
                end_reason = await self._interact(episode)
        except EnvironmentFailure as failure:
            episode.info.update(error=str(failure), failure=failure.kind)
            end_reason = EndReason.ENVIRONMENT_ERROR
        except (TurnAborted, RolloutError):
            end_reason = EndReason.ABORTED
        finally:
            self._turns.ended(trajectory_id)
            self._balancer.leave(leader)
        return episode.trajectory(end_reason)

    async def _answer(self, episode: Episode, prompt: Prompt) -> EndReason:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt[0], int):
            token_ids = [token for token in prompt if isinstance(token, int)]
            self._check_ids(token_ids)
            episode.give(Rendered(token_ids=token_ids, sources=[Source.PROMPT] * len(token_ids)))
        else:
            episode.give(self._chat.open([m for m in prompt if isinstance(m, Mapping)]))
        self._check_fits("the prompt", len(episode.ledger))
        answer = await self._next_turn(episode, {})
        episode.end_turn(answer, self._chat.decode(answer.token_ids))
        if answer.finish == "aborted":
            return EndReason.ABORTED
        return EndReason.MAX_TOKENS if answer.finish == "length" else EndReason.TERMINATED

    async def _interact(self, episode: Episode) -> EndReason:
        task, number = episode.task, episode.trajectory_id
        opening = self._pool.open(task.env, dict(task.params), task.seed)
        async with await self._turns.unless_aborted(number, opening) as environment:
            observation = await self._turns.unless_aborted(number, environment.reset())
            info: Mapping[str, Any] = observation.info
            episode.give(self._chat.open(_opening(observation.text, info)))
            self._check_fits("the prompt", len(episode.ledger))
            while True:
                answer = await self._next_turn(episode, info)
                text = self._chat.decode(answer.token_ids)
                if answer.finish == "aborted":
                    episode.end_turn(answer, text)
                    return EndReason.ABORTED
                step = environment.step(text)
                try:
                    outcome = await self._turns.unless_aborted(number, step)
                except (EnvironmentFailure, TurnAborted, RolloutError):
                    episode.end_turn(answer, text)
                    raise
                info = outcome.info
                valid = info.get("valid_action")
                episode.end_turn(answer, text, reward=outcome.reward, valid_action=valid)
                episode.info.update(_kept(info))
                if outcome.terminated:
                    episode.check_end()
                    return EndReason.TERMINATED
                if outcome.truncated or len(episode.turns) == self._max_turns:
                    episode.check_end()
                    return EndReason.TRUNCATED
                closed = answer.token_ids[-1] in self._chat.end_of_turn_ids
                reply = self._chat.reply(outcome.text, closed=closed)
                if not self._fits(len(episode.ledger) + len(reply.token_ids)):
                    return EndReason.MAX_TOKENS
                episode.give(reply)

    async def _next_turn(self, episode: Episode, info: Mapping[str, Any]) -> Answer:
        """What the model says now, or had said in an episode that is resumed."""
        recalled = episode.recall()
        if recalled is not None:
            return recalled
        context = episode.context
        params = self._params(episode.task, info, len(context), episode.num_begun)
        if episode.begun is not None:
            self._check_fits("the turn to resume, with its context,", len(context))
        request = TurnRequest(
            trajectory=episode.trajectory_id,
            turn=len(episode.turns),
            token_ids=context,
            seed=self._seed,
            experts_from=episode.num_with_experts,
            sampling=params,
            num_resumed=episode.num_begun,
        )
        result = await self._turns.generate(
            episode.leader, request, num_sampled=episode.num_sampled
        )
        return episode.hear(result)

    def _params(
        self, task: Task, info: Mapping[str, Any], num_context: int, num_begun: int
    ) -> SamplingParams:
        """The job's sampling with what the environment allows, or prescribes, in this turn, of
        which `num_begun` tokens are in the context already."""
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
            self._check_room(num_context, num_tokens - num_begun)
            params = replace(params, max_tokens=num_tokens, stop_token_ids=(), stop_strings=())
        if num_begun:  # at least one more: only a lower limit than at first leaves none
            params = replace(params, max_tokens=max(1, params.max_tokens - num_begun))
        try:
            validate(params, self._limits.vocab_size)
        except ValueError as error:
            raise EnvironmentFailure("invalid", str(error)) from error
        return params

    def _fits(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens leaves room to sample at least one."""
        return num_tokens < min(self._limits.max_context, self._limits.pool_tokens)

    def _check_fits(self, what: str, num: int) -> None:
        if not self._fits(num):
            raise EnvironmentFailure(
                "invalid",
                f"{what} has {num} tokens; the context holds {self._limits.max_context} and "
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
