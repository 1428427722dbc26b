"""The folder a rollout writes its results to."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from interlace.rollout.config import ConfigError

NEEDED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Names of the files of one rollout."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.parquet"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them, in the order they are written."""
        return (self.config, self.trajectories, self.trace, self.timeline, self.summary)

    def prepare(self) -> None:
        """Make the folder, writable and free of an earlier rollout's files.

        ConfigError, with nothing removed, if it holds anything else, cannot be written, or the
        disk is nearly full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            entries = sorted(self.path.iterdir())
            with tempfile.TemporaryFile(dir=self.path):
                pass
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise ConfigError(
                f"--out {self.path}: cannot write there: {error.strerror}: choose another folder"
            ) from error
        own = {name for file in self.files for name in (file.name, file.name + ".partial")}
        strangers = [entry.name for entry in entries if entry.name not in own]
        if strangers:
            raise ConfigError(
                f"--out {self.path}: holds {', '.join(strangers[:3])}, not the files of a rollout: "
                "choose an empty or new folder"
            )
        if free < NEEDED_BYTES:
            raise ConfigError(
                f"--out {self.path}: {free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB needed: "
                "free some space or choose another disk"
            )
        for entry in entries:
            if not entry.is_file():
                raise ConfigError(f"--out {self.path}: {entry.name} is not a file: remove it")
        for entry in entries:
            entry.unlink()
