"""One learning run: rollout, comparison, training, update of the weights, and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch

from interlace.rollout import EndReason, Rollout, RolloutConfig, Task, Trajectory, load_config
from interlace.rollout.digest import digest
from interlace.rollout.weights_sync import update_positions

from .batch import batch_of
from .gap import gap_by_lag
from .lake_model import action_choices, write_lake_model
from .learner import Learner, Weights
from .record import Iteration, Outcome, Plan, Positions

KEPT_VERSIONS = 2
"""An episode is played by the weights it began under, and by those that came meanwhile."""


def learn(
    plan: Plan,
    folder: Path,
    *,
    mode: str,
    kind: str,
    positions: Positions | None = None,
    on_iteration: Callable[[Iteration], None] = lambda _: None,
) -> Outcome:
    """Train a new model in `folder`, which also receives its starting point.

    `mode` and `kind` are those of a rollout. With `positions` of an earlier run weights change
    exactly where they did in it. Raises RuntimeError if an episode ends by anything but the lake.
    """
    began_at = time.monotonic()
    torch.set_num_threads(1)
    model = write_lake_model(folder / "model", plan.seed)
    iterations: list[Iteration] = []
    everything: list[Trajectory] = []
    trainer = Trainer(Learner(model, plan.recipe, replay_routing=not plan.in_flight))
    with Rollout(job(plan, model, mode=mode, kind=kind)) as rollout:
        if positions:
            rollout.update_at(positions)
        ahead = rollout.run(tasks(plan, 0))
        for number in range(plan.iterations):
            seconds: dict[str, float] = {}
            with timed(seconds, "rollout"):
                trajectories = sorted(ahead, key=lambda trajectory: trajectory.trajectory_id)
            check_ends(trajectories)
            everything += trajectories
            following = tasks(plan, number + 1) if number + 1 < plan.iterations else []
            if plan.in_flight and following:
                ahead = rollout.run(following)
            iteration = trainer.iterate(rollout, number, trajectories, seconds)
            if not plan.in_flight and following:
                ahead = rollout.run(following)
            iterations.append(iteration)
            on_iteration(iteration)
    return Outcome(
        plan=plan,
        mode=mode,
        kind=kind,
        iterations=tuple(iterations),
        positions=update_positions(everything) if plan.in_flight else {},
        wall_s=time.monotonic() - began_at,
    )


class Trainer:
    """A learner, and the weights of the last few versions to compare with."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._weights_of: dict[int, Weights] = {0: learner.weights()}

    def iterate(
        self,
        rollout: Rollout,
        number: int,
        trajectories: Sequence[Trajectory],
        seconds: dict[str, float],
    ) -> Iteration:
        """Learn from the trajectories of iteration `number`, then have the ranks install the new
        weights. What `rollout` plays meanwhile goes on."""
        learner = self._learner
        batch = batch_of(trajectories, action_choices(), learner.vocab_size)
        with timed(seconds, "gap"):
            gap = gap_by_lag(learner, batch, trajectories, self._weights_of)
        with timed(seconds, "train"):
            learnt = learner.learn(batch)
        version = number + 1
        self._weights_of[version] = learner.weights()
        self._weights_of.pop(version - KEPT_VERSIONS, None)
        with timed(seconds, "update"):
            report = rollout.update_weights(self._weights_of[version], version, mode="keep")
        return Iteration(
            number=number,
            success=fmean(trajectory.return_ > 0 for trajectory in trajectories),
            mean_turns=fmean(trajectory.num_turns for trajectory in trajectories),
            loss=learnt.loss,
            entropy=learnt.entropy,
            grad_norm=learnt.grad_norm,
            gap=gap,
            tokens_of_version=batch.tokens_of_version,
            digest=digest(trajectories),
            weights=report.digest,
            seconds=seconds | {"stall": report.stall_s},
        )


def job(plan: Plan, model: Path, *, mode: str, kind: str) -> RolloutConfig:
    """Two ranks, and two processes with room for all episodes of an iteration at once."""
    half = (plan.episodes + 1) // 2
    return load_config(
        overrides=[
            f"seed={plan.seed}",
            f"mode={mode}",
            f"model.path={json.dumps(str(model))}",
            f"launch.kind={kind}",
            "layout.world=2",
            f"scheduler.max_running={half}",
            "environments.num_processes=2",
            f"environments.episodes_per_process={half}",
            f"results_queue={plan.episodes + 1}",
        ]
    )


def tasks(plan: Plan, iteration: int) -> list[Task]:
    """The episodes of an iteration: one lake, many attempts."""
    params = {"max_steps": plan.max_steps}
    one = Task("frozen_lake", seed=iteration, params=params, group_id=f"iteration-{iteration}")
    return [one] * plan.episodes


def check_ends(trajectories: Sequence[Trajectory]) -> None:
    """Raises RuntimeError unless every episode ended where the lake ends it."""
    fair = (EndReason.TERMINATED, EndReason.TRUNCATED)
    wrong = [trajectory for trajectory in trajectories if trajectory.end_reason not in fair]
    if wrong:
        why = wrong[0].info.get("error", "no reason given")
        raise RuntimeError(
            f"{len(wrong)} of {len(trajectories)} episodes did not end on the lake; the first is "
            f"trajectory {wrong[0].trajectory_id}, {wrong[0].end_reason.value}: {why}"
        )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block took."""
    began_at = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began_at
