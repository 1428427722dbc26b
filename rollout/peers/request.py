"""What every run of a comparison has to know, whoever plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlace.rollout.cache import BENCH_MODEL, model_folder
from interlace.rollout.chat import Chat
from interlace.rollout.config import RolloutConfig
from interlace.rollout.config_file import load_config

from .contestants import INTERLACE_JOB, LLAMA_CPP, why_absent
from .workload import Phase, Shape, phases


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersRequest:
    """The work, the model, and where the other engines are."""

    installed: Path
    """The folder of `make peers`."""
    model: str = BENCH_MODEL
    shape: Shape = field(default_factory=Shape)
    overrides: tuple[str, ...] = ()
    """Of Interlace's job, in every mode."""
    tiles: bool = True
    """Whether everybody may use the processor's matrix tiles; otherwise nobody does."""

    def as_json(self) -> dict[str, Any]:
        return {
            "installed": str(self.installed),
            "model": self.model,
            "shape": self.shape.as_json(),
            "overrides": list(self.overrides),
            "tiles": self.tiles,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PeersRequest:
        return cls(
            installed=Path(values["installed"]),
            model=values["model"],
            shape=Shape.from_json(values["shape"]),
            overrides=tuple(values["overrides"]),
            tiles=values["tiles"],
        )

    def why_absent(self, peer: str) -> str | None:
        """None if an engine can take part."""
        why = why_absent(self.installed, peer)
        if why is None and peer == LLAMA_CPP and self.model != BENCH_MODEL:
            return f"its checkpoint is {BENCH_MODEL}, and the model is {self.model}"
        return why

    def phases(self) -> list[Phase]:
        """What is to be played."""
        return phases(self.shape, Chat(model_folder(self.model)))

    def config(self, overrides: tuple[str, ...] = ()) -> RolloutConfig:
        """Interlace's job in one mode. ConfigError if it cannot be."""
        path = f"model.path={model_folder(self.model)}"
        return load_config(overrides=[path, *INTERLACE_JOB, *self.overrides, *overrides])
