"""One number for what a rollout computed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import numpy as np

from interlace.rollout.trajectory import Trajectory


def digest(trajectories: Iterable[Trajectory]) -> str:
    """sha256 (hex) that is equal only if tokens, log-probabilities and experts are, bit for bit.

    Independent of the order given, of modes, layouts and times. Trajectories that are not
    `reproducible` are left out: where they ended is no property of the numbers.

    Bytes, little-endian, per trajectory in ascending id: id i64; number of tokens i64 and their
    ids i32; number of sampled tokens i64, their positions i64, their raw and then their sampling
    log-probabilities f32; experts known, layers, top_k i64 and uint8 [known, layers, top_k];
    length i64 and UTF-8 of the end reason.

    ValueError if nothing is left to digest (it would say nothing) or an id occurs twice.
    """
    chosen = sorted(
        (t for t in trajectories if t.reproducible),
        key=lambda t: t.trajectory_id,
    )
    if not chosen:
        raise ValueError("no trajectory to digest: a digest over nothing says nothing")
    total = hashlib.sha256()
    previous: int | None = None
    for trajectory in chosen:
        if trajectory.trajectory_id == previous:
            raise ValueError(f"trajectory id {previous} occurs twice")
        previous = trajectory.trajectory_id
        _update(total, trajectory)
    return total.hexdigest()


def _update(total: hashlib._Hash, trajectory: Trajectory) -> None:
    sampled = np.flatnonzero(trajectory.loss_mask)
    total.update(struct.pack("<qq", trajectory.trajectory_id, trajectory.num_tokens))
    total.update(trajectory.token_ids.astype("<i4").tobytes())
    total.update(struct.pack("<q", len(sampled)))
    total.update(sampled.astype("<i8").tobytes())
    total.update(trajectory.logprob_raw[sampled].astype("<f4").tobytes())
    total.update(trajectory.logprob[sampled].astype("<f4").tobytes())
    total.update(struct.pack("<qqq", trajectory.experts_known, *trajectory.experts.shape[1:]))
    total.update(trajectory.experts[: trajectory.experts_known].tobytes())
    reason = trajectory.end_reason.value.encode()
    total.update(struct.pack("<q", len(reason)))
    total.update(reason)
