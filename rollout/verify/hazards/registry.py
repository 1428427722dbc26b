"""All rows of the catalogue: those that have a case, and why the others have none."""

from __future__ import annotations

from . import (
    device_order,
    foreign_operations,
    local_decisions,
    local_limits,
    memory_layout,
    no_rows,
    participation,
    pauses,
    shared_state,
    slow_rank,
    starvation,
    streams,
    threads,
    threads_on_a_group,
    updates,
    wrong_groups,
)
from .hazard import Hazard, NotShown

_MODULES = (
    participation,
    local_decisions,
    local_limits,
    foreign_operations,
    wrong_groups,
    shared_state,
    memory_layout,
    device_order,
    threads,
    threads_on_a_group,
    streams,
    no_rows,
    updates,
    pauses,
    starvation,
    slow_rank,
)

HAZARDS: tuple[Hazard, ...] = tuple(
    sorted((hazard for module in _MODULES for hazard in module.HAZARDS), key=lambda h: h.row)
)
"""By row. Every module of cases adds its own."""

NOT_SHOWN: tuple[NotShown, ...] = ()
"""Rows that have no case here."""
