"""From a configuration to the launcher it names."""

from __future__ import annotations

import importlib
from pathlib import Path

from interlace.rollout.config import RolloutConfig

from .launcher import Launcher

# Imported by name: Ray takes seconds to import, and only one of them is ever needed.
_LAUNCHERS = {
    "local": ("interlace.rollout.launch.local", "LocalLauncher"),
    "torchrun": ("interlace.rollout.launch.torchrun", "TorchrunLauncher"),
    "ray": ("interlace.rollout.launch.ray", "RayLauncher"),
}


def launcher_for(config: RolloutConfig, folder: Path) -> Launcher:
    """The launcher of `launch.kind`, which has started nothing yet."""
    module, name = _LAUNCHERS[config.launch.kind]
    launcher: Launcher = getattr(importlib.import_module(module), name)(config, folder)
    return launcher
