"""Scripts, phases and runs for tests, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.bench import Run
from interlace.rollout.peers.comparison import PeerComparison
from interlace.rollout.peers.contestants import PEERS, arms_of
from interlace.rollout.peers.scripts import Script
from interlace.rollout.peers.workload import Phase

ARMS = {arm.name: arm for family in ("interlace", *PEERS) for arm in arms_of(family)}


def script(name: str, *, num_turns: int = 1, num_generated: int = 3, wait_s: float = 0.0) -> Script:
    return Script(
        name=name,
        prompt=[5, 6, 7],
        observations=[[8, 9]] * (num_turns - 1),
        waits_s=[wait_s] * num_turns,
        num_generated=num_generated,
    )


def phase(name: str, scripts: Sequence[Script]) -> Phase:
    return Phase(name=name, tasks=(), scripts=tuple(scripts))


def figures(
    completion_s: float, *, cpu_s: float = 2.0, rate: float = 100.0, tokens: Any = None
) -> dict[str, Any]:
    """What a child would have written."""
    tokens = [[1, 2, 3, 4]] if tokens is None else tokens
    return {
        "completion_s": completion_s,
        "cpu_s": cpu_s,
        "prefill_tokens_per_s": {"1": rate, "8": 2 * rate},
        "decode_tokens_per_s": {"1": rate / 10, "8": None},
        "num_tokens": sum(len(one) for one in tokens),
        "tokens": tokens,
    }


def compared(
    found: Mapping[str, Sequence[dict[str, Any] | str]],
    *,
    absent: Mapping[str, str] | None = None,
    loads: Mapping[tuple[str, int], float] | None = None,
) -> PeerComparison:
    """`found`: arm -> the figures of its runs, or an error; a load over 0.2 makes one void."""
    runs: dict[Arm, list[Run]] = {}
    for name, each in found.items():
        runs[ARMS[name]] = [
            Run(
                arm=ARMS[name],
                repeat=number,
                figures=None if isinstance(one, str) else one,
                error=one if isinstance(one, str) else None,
                load=load,
                void=load > 0.2 and not isinstance(one, str),
            )
            for number, one in enumerate(each)
            for load in [(loads or {}).get((name, number), 0.05)]
        ]
    return PeerComparison(runs=runs, absent=absent or {})
