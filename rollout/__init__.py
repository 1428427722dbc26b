"""Rollouts: episodes of text environments played by a model spread over several ranks.

The names a script needs are here. They are loaded on first use, so that the pure modules of this
package stay importable without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ConfigError, RolloutConfig
    from .config_file import load_config
    from .rollout import Rollout
    from .store import read_trajectories
    from .tasks import Task, tasks_from
    from .trajectory import EndReason, Source, Trajectory, Turn
    from .turns import RolloutError
    from .weights_sync import TrainerGroup, UpdateError, UpdateReport, update_positions

_HOMES = {
    "ConfigError": "config",
    "EndReason": "trajectory",
    "Rollout": "rollout",
    "RolloutConfig": "config",
    "RolloutError": "turns",
    "Source": "trajectory",
    "Task": "tasks",
    "TrainerGroup": "weights_sync",
    "Trajectory": "trajectory",
    "Turn": "trajectory",
    "UpdateError": "weights_sync",
    "UpdateReport": "weights_sync",
    "load_config": "config_file",
    "read_trajectories": "store",
    "tasks_from": "tasks",
    "update_positions": "weights_sync",
}

__all__ = [
    "ConfigError",
    "EndReason",
    "Rollout",
    "RolloutConfig",
    "RolloutError",
    "Source",
    "Task",
    "TrainerGroup",
    "Trajectory",
    "Turn",
    "UpdateError",
    "UpdateReport",
    "load_config",
    "read_trajectories",
    "tasks_from",
    "update_positions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
