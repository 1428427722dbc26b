"""What is to be compared on what: everything a run in a process of its own has to know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from interlace.rollout.config import ConfigError
from interlace.rollout.config_file import read_toml
from interlace.rollout.workloads import Scale, Workload, load_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A workload and how it is to be played, whatever the arm."""

    workload: str
    """A name, or the path of a file."""
    scale: str = "minute"
    """minute, full, or factors of one's own: prompts=0.1,lengths=0.05."""
    model: str | None = None
    sleep: bool = True
    """Whether latencies, resets and penalties of environments are waited for."""
    overrides: tuple[str, ...] = ()
    """Of the job, for all arms."""

    def load(self) -> Workload:
        """ConfigError if there is no such workload, scale or model."""
        return load_workload(
            self.workload, scale=scale_of(self.scale), model=self.model, sleep=self.sleep
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        return cls(**{**values, "overrides": tuple(values["overrides"])})


def scale_of(text: str) -> str | Scale:
    """The scale a command line names; factors that it does not name are 1."""
    if "=" not in text:
        return text
    lines = [word.replace("=", " = ", 1) for word in text.split(",")]
    return read_toml(Scale, "\n".join(lines), f"--scale {text}")


def link_overrides(text: str) -> tuple[str, ...]:
    """``500us,2gbit`` or ``1ms,10gbit,shared`` as keys of the job.

    Every path of a rank has a link of its own unless it is shared.
    """
    latency_us: float | None = None
    gbit: float | None = None
    shared = False
    for word in text.split(","):
        if found := re.fullmatch(r"\s*([\d.]+)\s*(us|ms)\s*", word):
            latency_us = float(found[1]) * (1000 if found[2] == "ms" else 1)
        elif found := re.fullmatch(r"\s*([\d.]+)\s*gbit\s*", word):
            gbit = float(found[1])
        elif word.strip() == "shared":
            shared = True
        else:
            raise ConfigError(f"--link {text}: {word!r} is no part of a link: try 500us,2gbit")
    link = {"latency_us": latency_us or 0.0, "shared": shared}
    if gbit is not None:
        link["gbit"] = gbit
    return tuple(f"launch.link.{key}={json.dumps(value)}" for key, value in link.items())
