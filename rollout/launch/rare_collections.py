"""Python's collector of cycles, kept out of a rank's steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = 100_000, 50, 50
"""A step makes a few hundred objects that stay: its record and its tickets'."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """What was made so far is never looked through again, and what is made from here on rarely.

    By default a decode step is interrupted every few steps, and every hundred or so all that was
    ever recorded is looked through, while the other ranks wait. Hardly anything here is a cycle.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
