"""All rows of the catalogue: those that have a case, and why the others have none."""

from __future__ import annotations

from . import participation
from .hazard import Hazard, NotShown

HAZARDS: tuple[Hazard, ...] = (*participation.HAZARDS,)
"""By row. Every module of cases adds its own."""

NOT_SHOWN: tuple[NotShown, ...] = ()
"""Rows that only a GPU can show, or that are no hazard of code."""
