"""New weights for ranks that generate: from a trainer to all of them, or to none.

The names a script needs are here; they are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import UpdateError
    from .positions import update_positions
    from .report import UpdateReport
    from .trainer_group import TrainerGroup

_HOMES = {
    "TrainerGroup": "trainer_group",
    "UpdateError": "errors",
    "UpdateReport": "report",
    "update_positions": "positions",
}

__all__ = ["TrainerGroup", "UpdateError", "UpdateReport", "update_positions"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
