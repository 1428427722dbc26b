"""What an update did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.rollout.messages import UpdateMode


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One version that is in use on all ranks."""

    version: int
    mode: UpdateMode
    digest: str
    """Of all its tensors as they were received; the same on every rank and here."""
    num_bytes: int
    """Of all its tensors; 0 where they did not pass through this process."""
    rank_bytes: tuple[int, ...] = ()
    """Of those that each rank keeps."""
    stage_s: float
    """Seconds until every rank held the version complete and checked; generation went on."""
    stall_s: float
    """Longest time for which a rank's loop did nothing else because of the update."""
    total_s: float
    """Seconds until it was in use on all ranks."""
    dropped_tokens: int
    """Rows of keys and values that are computed again."""
    aborted: tuple[int, ...]
    """Trajectories whose turn the update ended."""

    @classmethod
    def told_elsewhere(cls, version: int, mode: UpdateMode) -> UpdateReport:
        """What a process says that does not play the episodes: another one has the figures."""
        return cls(
            version=version,
            mode=mode,
            digest="",
            num_bytes=0,
            stage_s=0.0,
            stall_s=0.0,
            total_s=0.0,
            dropped_tokens=0,
            aborted=(),
        )

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"version {self.version} ({self.mode}): {self.num_bytes / 2**20:.1f} MiB in "
            f"{self.total_s:.3f} s, of which staged {self.stage_s:.3f} s; ranks stood still for "
            f"{self.stall_s * 1e3:.1f} ms; {self.dropped_tokens} tokens to compute again, "
            f"{len(self.aborted)} turns ended"
        )
