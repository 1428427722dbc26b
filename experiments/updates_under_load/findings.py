"""What an output says about the weights that made it, and what must never be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from interlace.experiments.updates_under_load.versions import Versions
from interlace.moe.alone import logprobs_alone
from interlace.rollout import Trajectory


def wrong_versions(trajectories: Sequence[Trajectory], known: Collection[int]) -> list[str]:
    """Tokens of unknown versions, versions that decrease along an output, keys and values from the
    future."""
    found = []
    for trajectory in trajectories:
        who, sampled = f"trajectory {trajectory.trajectory_id}", trajectory.loss_mask
        version, kv_version = trajectory.version[sampled], trajectory.kv_version[sampled]
        if unknown := sorted({int(v) for v in (*version, *kv_version)} - set(known)):
            found.append(f"{who}: unknown versions {unknown}")
        if (np.diff(version) < 0).any():
            found.append(f"{who}: versions decrease: {version.tolist()}")
        if (kv_version > version).any():
            found.append(f"{who}: keys and values newer than the token")
    return found


def tokens_of_versions(trajectories: Sequence[Trajectory]) -> Counter[int]:
    """Version -> tokens it has sampled."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        counts.update(trajectory.version[trajectory.loss_mask].tolist())
    return counts


def mixed_tokens(
    trajectories: Sequence[Trajectory],
    versions: Versions,
    number_of: Callable[[int], int],
) -> tuple[int, list[str]]:
    """Tokens that say they come from one version alone, keys and values included, and whose
    log-probability is not, bit for bit, what that version gives on one rank; and how many were
    compared. `number_of`: which weights a version has."""
    compared, found = 0, []
    for trajectory in trajectories:
        pure = trajectory.loss_mask & (trajectory.version == trajectory.kv_version)
        ids = trajectory.token_ids.tolist()
        for version in sorted(set(trajectory.version[pure].tolist())):
            mine = pure & (trajectory.version == version)
            first = int(np.argmax(mine))
            last = len(ids) - int(np.argmax(mine[::-1]))
            weights = versions.weights(number_of(version))
            wanted = logprobs_alone(versions.config, weights, ids[:last], first)
            right = np.array(wanted, np.float32) == trajectory.logprob_raw[first:last]
            compared += int(mine.sum())
            if not right[mine[first:last]].all():
                found.append(
                    f"trajectory {trajectory.trajectory_id}: tokens of version {version} are not "
                    "what it gives"
                )
    return compared, found
