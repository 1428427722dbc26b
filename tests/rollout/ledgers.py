"""Ledgers as trajectories, for tests of what is read off them."""

from interlace.rollout.trajectory import EndReason, Ledger, Trajectory


def closed(ledger: Ledger) -> Trajectory:
    """A trajectory that has these tokens and nothing else to tell."""
    return Trajectory.from_ledger(
        ledger,
        trajectory_id=7,
        task_id="task",
        group_id=None,
        env="prompt",
        seed=0,
        turns=(),
        end_reason=EndReason.TERMINATED,
        info={},
    )
