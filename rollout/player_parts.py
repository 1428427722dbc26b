"""A player, put together for a job from what its ranks have said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interlace.moe.sampler import validate
from interlace.moe.sampling_params import SamplingParams

from .balancer import Balancer
from .chat import Chat
from .collector import Collector, Limits
from .config import RolloutConfig
from .environments import EnvironmentPool
from .messages import RankReady
from .meter import Meter
from .player import Player
from .rewards import RewardFn
from .trajectory_ids import TrajectoryIds
from .turns import Turns


def compose_player(
    config: RolloutConfig,
    *,
    chat: Chat,
    ready: Sequence[RankReady],
    num_leaders: int,
    pool: EnvironmentPool,
    turns: Turns,
    meter: Meter,
    ids: TrajectoryIds,
    version: Callable[[], int],
    reward_fn: RewardFn | None,
) -> Player:
    """`ready`: the first word of every rank. ValueError for sampling that this model cannot do."""
    environments = config.environments
    limits = Limits(
        max_context=min(one.max_context for one in ready),
        pool_tokens=min(one.pool_tokens for one in ready),
        vocab_size=min(one.vocab_size for one in ready),
    )
    sampling = _sampling(config, chat, ready)
    validate(sampling, limits.vocab_size)
    collector = Collector(
        chat=chat,
        turns=turns,
        pool=pool,
        balancer=Balancer(num_leaders),
        limits=limits,
        sampling=sampling,
        max_turns=environments.max_turns,
        seed=config.seed,
    )
    places = environments.num_processes * environments.episodes_per_process
    rows = 2 * config.scheduler.max_running * num_leaders
    return Player(
        collector=collector,
        turns=turns,
        meter=meter,
        ids=ids,
        version=version,
        num_places=max(places, rows),
        results_queue=config.results_queue,
        reward_fn=reward_fn,
        rewards_per=config.rewards.per,
        unsafe=config.unsafe,
    )


def _sampling(config: RolloutConfig, chat: Chat, ready: Sequence[RankReady]) -> SamplingParams:
    """The job's, with all tokens that end a turn of this model."""
    stop = {*config.sampling.stop_token_ids, *chat.end_of_turn_ids}
    stop.update(*(one.stop_token_ids for one in ready))
    return SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=tuple(sorted(stop)),
        stop_strings=config.sampling.stop_strings,
    )
