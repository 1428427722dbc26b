"""Runs in which rules are broken on purpose say so: at their start, and in every trajectory."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from .config import Unsafe
from .trajectory import Trajectory


def warn_of(unsafe: Unsafe) -> None:
    """Red lines on stderr, if any arm is on."""
    if unsafe.arms:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"UNSAFE: {in_words(unsafe)}", style="bold red", markup=False)
        console.print(
            "UNSAFE: this run may hang or give wrong tokens; it is for tests of safety",
            style="bold red",
            markup=False,
        )


def in_words(unsafe: Unsafe) -> str:
    """The arms, and the levels of verification that are off."""
    off = f", without {', '.join(unsafe.without)}" if unsafe.without else ""
    return f"{', '.join(unsafe.arms)}{off}"


def marked(trajectory: Trajectory, unsafe: Unsafe) -> Trajectory:
    """The trajectory, with the arms in its info if any is on: then it is not `exact`."""
    if not unsafe.arms:
        return trajectory
    return replace(trajectory, info={**trajectory.info, "unsafe": in_words(unsafe)})
