"""Rows 1 to 18 of the catalogue: ranks that take part differently, or in another order."""

from __future__ import annotations

from .hazard import Hazard

HAZARDS: tuple[Hazard, ...] = ()
