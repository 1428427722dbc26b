"""What a workload is, in numbers that are known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .workload import Workload


def describe(workload: Workload) -> dict[str, Any]:
    """Counts, quantiles of lengths and times, and the tokens to prefill and to generate.

    `prefill_tokens` counts a beginning that prompts share once, and every appended token, as with
    a cache that loses nothing: preemption, eviction, and members of a group on different ranks
    add to it. `prefill_share` is its share of all tokens computed; the share of time depends on
    the machine.
    """
    episodes = workload.episodes
    turns = [turn for one in episodes for turn in one.turns]
    generated = sum(turn.generate for turn in turns)
    # The last token of a turn is computed only with what is appended behind it.
    appended = sum(turn.append + 1 for turn in turns if turn.append)
    prompts = _unique_tokens(one.prompt for one in episodes)
    prefill = prompts + appended
    return {
        "trajectories": len(episodes),
        "groups": len({(one.part, one.group) for one in episodes}),
        "parts": {
            part: sum(one.part == part for one in episodes)
            for part in dict.fromkeys(one.part for one in episodes)
        },
        "turns": len(turns),
        "cut_at_max_context": sum(one.cut for one in episodes),
        "retries": sum(turn.retries for turn in turns),
        "turns_per_trajectory": _quantiles([len(one.turns) for one in episodes]),
        "prompt": _quantiles([one.num_prompt for one in episodes]),
        "append": _quantiles([turn.append for turn in turns if turn.append]),
        "generate": _quantiles([turn.generate for turn in turns]),
        "context": _quantiles([one.num_context for one in episodes]),
        "step_s": _quantiles([turn.wait_s for turn in turns]),
        "reset_s": _quantiles([one.reset_s for one in episodes]),
        "longest_wait_s": max(
            one.reset_s + sum(turn.wait_s for turn in one.turns) for one in episodes
        ),
        "prompt_tokens": prompts,
        "appended_tokens": appended,
        "prefill_tokens": prefill,
        "generated_tokens": generated,
        "prefill_share": prefill / (prefill + generated),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90, p99 = np.quantile(np.array(values, np.float64), [0.5, 0.9, 0.99]).tolist()
    mean = float(np.mean(np.array(values, np.float64)))
    return {"mean": mean, "p50": p50, "p90": p90, "p99": p99, "max": float(max(values))}


def _unique_tokens(prompts: Iterable[tuple[tuple[int, int], ...]]) -> int:
    """Tokens of all prompts, what one shares with the beginning of another counted once."""
    longest: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}
    for prompt in prompts:
        before: tuple[tuple[int, int], ...] = ()
        for seed, num in prompt:
            lengths = longest.setdefault(before, {})
            lengths[seed] = max(lengths.get(seed, 0), num)
            before = (*before, (seed, num))
    return sum(num for lengths in longest.values() for num in lengths.values())
