"""What a run with ``[unsafe]`` arms came to, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum

from .config import Layout, RolloutConfig, Unsafe
from .digest import digest
from .rollout import Rollout
from .tasks import Task
from .trajectory import Trajectory


class Outcome(Enum):
    """How a broken rule showed, or did not."""

    HANG_DIAGNOSED = "hang diagnosed"
    DIVERGENCE_DETECTED = "divergence detected"
    CANARY_HIT = "canary hit"
    CRASH = "crash"
    WRONG_TOKENS = "wrong tokens"
    UNSEEN = "unseen"
    FINISHED = "finished"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Outcome.HANG_DIAGNOSED: "ranks waited for one another; the error says who waits for what",
    Outcome.DIVERGENCE_DETECTED: "verification found it, and the step's results were not believed",
    Outcome.CANARY_HIT: "bytes around a message had been overwritten",
    Outcome.CRASH: "foreign data broke a rank's arithmetic, or the transport ended its process",
    Outcome.WRONG_TOKENS: "trajectories were delivered that a safe run does not give",
    Outcome.UNSEEN: "right tokens: nothing showed",
    Outcome.FINISHED: "there was nothing to compare the tokens with",
}

_SIGNS = (
    ("CanaryError", Outcome.CANARY_HIT),
    ("DivergedError|OrderError|BufferInFlightError|DIVERGED", Outcome.DIVERGENCE_DETECTED),
    ("RAISED|DEAD", Outcome.CRASH),
    ("DeadlockError|CollectiveTimeoutError|MISSING|BLOCKED|SLOW", Outcome.HANG_DIAGNOSED),
)
"""What the text of a failure holds: types of errors, or verdicts on ranks; causes come first."""


def outcome_of(
    delivered: Sequence[Trajectory], error: BaseException | None, safe: Mapping[int, str] | None
) -> Outcome:
    """What the trajectories that were delivered say, and the error that ended the run, if any.

    `safe`: what `safe_digests` gave. Wrong tokens come before any error: nobody was warned.
    """
    if safe is not None and any(
        trajectory.reproducible and digest([trajectory]) != safe[trajectory.trajectory_id]
        for trajectory in delivered
    ):
        return Outcome.WRONG_TOKENS
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        seen = (sign for words, sign in _SIGNS if re.search(rf"\b({words})\b", text))
        return next(seen, Outcome.CRASH)
    return Outcome.FINISHED if safe is None else Outcome.UNSEEN


def safe_digests(config: RolloutConfig, tasks: Sequence[Task]) -> dict[int, str] | None:
    """The digest of every trajectory of the same job without arms.

    It runs on one rank, in this process, in mode serial. None on GPUs, whose arithmetic is not
    this process's, and where a clock or a hand ended some trajectories.
    """
    if config.launch.backend != "gloo":
        return None
    launch = {"kind": "local", "serial_device_slots": 0, "transport": "auto", "link": None}
    safe = config.model_copy(
        update={
            "mode": "serial",
            "unsafe": Unsafe(),
            "layout": Layout(),
            "launch": config.launch.model_copy(update=launch),
        }
    )
    with Rollout(safe) as rollout:
        trajectories = list(rollout.run(tasks))
    if not all(trajectory.reproducible for trajectory in trajectories):
        return None
    return {trajectory.trajectory_id: digest([trajectory]) for trajectory in trajectories}
