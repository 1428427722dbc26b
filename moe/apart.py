"""Computations of our kernels that stand aside in the middle where another path waits."""

from __future__ import annotations

from interlace.comm.collectives import preemption_point

from . import kernels

MOST_PANELS = 16
"""Panels of 64 outputs that are computed before standing aside where nothing tells of what another
path waits for: for 32 rows of 512 inputs, a quarter of a millisecond on vectors."""


async def through(apart: object) -> None:
    """Compute it to its end, with a preemption point before and wherever it stands aside.

    `apart`: from one of the kernels that make such.
    """
    over = False
    while not over:
        watch = await preemption_point()
        if watch is None:
            over = kernels.native.compute_on(apart, None, 0)
        else:
            over = kernels.native.compute_on(apart, watch.native, MOST_PANELS)
