"""Which environment variables a process below this one sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def present(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that are set here, with their values."""
    return {name: os.environ[name] for name in names if name in os.environ}


def for_python() -> dict[str, str]:
    """What makes a Python process find modules where this one does, use one thread, and order sets
    the same way every time."""
    return {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
