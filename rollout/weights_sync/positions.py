"""At which tokens a recorded run changed its weights."""

from __future__ import annotations

from collections.abc import Iterable

from interlace.rollout.trajectory import Source, Trajectory


def update_positions(
    trajectories: Iterable[Trajectory], *, newest: int | None = None
) -> dict[int, dict[int, int]]:
    """{version: {trajectory: tokens it sampled under older versions}}, what `update_at` takes.

    Of all versions behind the oldest that sampled a token, up to `newest`: by default the newest
    that sampled one. Give it if later ones were installed before the run had ended.
    """
    sampled = {
        trajectory.trajectory_id: trajectory.version[trajectory.source == Source.SAMPLED]
        for trajectory in trajectories
    }
    found = [int(version) for versions in sampled.values() for version in versions]
    if not found:
        return {}
    last = max(found) if newest is None else newest
    return {
        version: {
            number: count
            for number, versions in sorted(sampled.items())
            if (count := int((versions < version).sum()))
        }
        for version in range(min(found) + 1, last + 1)
    }
