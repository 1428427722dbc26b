"""The folders that commands write their results to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
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
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """A folder, there only if asked for."""
        return self.path / "tensorboard"

    @property
    def failure(self) -> Path:
        """A folder, there only after a rank failed."""
        return self.path / "failure"

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
        return (
            self.config,
            self.metrics,
            self.trajectories,
            self.trace,
            self.timeline,
            self.summary,
        )

    def prepare(self) -> None:
        """See `prepare_folder`."""
        prepare_folder(self.path, self.files, (self.tensorboard, self.failure))


def prepare_folder(path: Path, files: Sequence[Path], folders: Sequence[Path] = ()) -> None:
    """Make `path`, writable and free of what an earlier command left: `files` and `folders`.

    ConfigError, with nothing removed, if it holds anything else, cannot be written, or the disk is
    nearly full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        entries = sorted(path.iterdir())
        with tempfile.TemporaryFile(dir=path):
            pass
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot write there: {error.strerror}: choose another folder"
        ) from error
    own = {name for file in files for name in (file.name, file.name + ".partial")}
    own_folders = {folder.name for folder in folders}
    strangers = [entry.name for entry in entries if entry.name not in own | own_folders]
    if strangers:
        raise ConfigError(
            f"--out {path}: holds {', '.join(strangers[:3])}, not the files of a rollout: "
            "choose an empty or new folder"
        )
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"--out {path}: {free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB needed: "
            "free some space or choose another disk"
        )
    for entry in entries:
        if entry.is_dir() != (entry.name in own_folders):
            kind = "a file" if entry.name in own else "a folder"
            raise ConfigError(f"--out {path}: {entry.name} is not {kind}: remove it")
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
