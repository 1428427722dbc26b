"""Kernels that spin on memory, and the many orders in which several of them may run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from interlace.comm.collectives import finish
from interlace.comm.errors import CommunicationError, DeadlockError
from interlace.comm.testing import LocalWorld

from .hazard import WrongDataError

NUM_SCHEDULES = 40


class _Memory:
    """Stands where a communicator would: a kernel waits for what it reads, and for nothing else."""

    timeout_s = float("inf")

    def poll(self, until: Callable[[], bool]) -> bool:
        return until()

    def result(self, until: Callable[[], bool]) -> None:
        return None


_MEMORY = _Memory()


async def spin(until: Callable[[], bool], where: str) -> None:
    """Wait until memory says so; `where` is for the error if it never does."""
    await finish(_MEMORY, until, where)


async def pause() -> None:
    """Between two instructions: any other kernel may run here."""
    await spin(lambda: True, "about to go on")


def run_kernels(kernels: Sequence[Coroutine[Any, Any, Any]], seed: int) -> list[Any]:
    """All of them at the same time, in one drawn order. DeadlockError if nothing can move."""
    world = LocalWorld(len(kernels), split=_opaque, concat=_opaque, copy=_opaque, seed=seed)
    return world.run(kernels)


def _opaque(*_: Any) -> Any:
    raise AssertionError("kernels only read and write memory")


def in_schedules(run: Callable[[int], object], *, num: int = NUM_SCHEDULES) -> str:
    """Run under `num` drawn schedules; raise what most often went wrong, with all counts."""
    failures: list[CommunicationError | WrongDataError] = []
    for seed in range(num):
        try:
            run(seed)
        except (CommunicationError, WrongDataError) as error:
            failures.append(error)
    if not failures:
        return f"right in all of {num} schedules"
    counts = Counter(type(error) for error in failures)
    most = counts.most_common(1)[0][0]
    first = next(error for error in failures if type(error) is most)
    hangs = counts[DeadlockError]
    raise most(
        f"of {num} schedules {hangs} hang, {len(failures) - hangs} go wrong otherwise; "
        f"for example: {first}"
    )
