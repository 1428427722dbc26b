"""Rows 30, 33 and 35 of the catalogue: two threads drive one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from interlace.comm.collectives import Gather, perform
from interlace.comm.errors import DeadlockError
from interlace.comm.path import Path
from interlace.comm.serial_device import SerialDevice

from .hazard import Hazard, Outcome, WrongDataError, outcome_of
from .schedules import in_schedules
from .stamped import NUM_OURS, Stamp, run_stamped, stamped

RANKS = (0, 1)


TIMEOUT_S = 10.0


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    """All at the same time; raises what one of them raised."""
    errors: list[BaseException] = []

    def caught(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(run,), daemon=True) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]


def _check_done(device: SerialDevice, names: Sequence[str]) -> None:
    """Nobody will launch anything any more."""
    stuck = [name for name in names if not all(device.is_done(rank, name) for rank in RANKS)]
    if stuck:
        raise DeadlockError(f"all is launched, and {', '.join(stuck)} never run")


def two_launching_threads() -> Outcome:
    """A thread for transfers and one for reductions; on each rank another one gets there first."""

    def run() -> str:
        device = SerialDevice(len(RANKS), slots=1)

        def launch(rank: int, name: str, mine: threading.Event, after: threading.Event) -> None:
            after.wait(TIMEOUT_S)
            device.enqueue(rank, name, RANKS)
            mine.set()

        for rank, first, second in ((0, "p2p", "all-reduce"), (1, "all-reduce", "p2p")):
            now, then, end = threading.Event(), threading.Event(), threading.Event()
            now.set()
            in_threads(
                [
                    lambda: launch(rank, first, then, now),  # noqa: B023 - joined in this turn
                    lambda: launch(rank, second, end, then),  # noqa: B023
                ]
            )
        _check_done(device, ("p2p", "all-reduce"))
        return "both ran"

    return outcome_of(run)


def one_launching_thread() -> Outcome:
    """Whatever path it is for, a post comes from the one thread that walks the plan."""

    def run() -> str:
        posters = set[int]()

        async def watched(path: Path, rank: int, stamp: Stamp) -> None:
            posters.add(threading.get_ident())
            await stamped(path, rank, stamp)

        said = in_schedules(
            lambda s: run_stamped(seed=s, serial_slots=1, forward=watched), num=NUM_OURS
        )
        return f"{said}; {len(posters)} thread"

    return outcome_of(run)


class LaunchRing:
    """A device's ring of launches, as two communicators find it: look where, then write there."""

    def __init__(self) -> None:
        self.entries: list[str | None] = [None] * 4
        self._end = 0

    def launch(self, name: str, looked: threading.Barrier | None) -> None:
        at = self._end
        if looked is not None:
            looked.wait(TIMEOUT_S)
        self.entries[at] = name
        self._end = at + 1


def host_threads_race() -> Outcome:
    """On rank 0 both threads look before either writes: one launch is lost."""

    def run() -> str:
        names = ("prefill", "decode")
        rings = [LaunchRing() for _ in RANKS]
        race = threading.Barrier(2)
        in_threads([lambda name=name: rings[0].launch(name, race) for name in names])  # type: ignore[misc]
        for name in names:
            rings[1].launch(name, None)
        device = SerialDevice(len(RANKS), slots=2)
        for rank in RANKS:
            for entry in filter(None, rings[rank].entries):
                device.enqueue(rank, entry, RANKS)
        _check_done(device, names)
        return "both ran"

    return outcome_of(run)


class MicrobatchError(Exception):
    """What one half of a batch raises."""


def a_parked_thread_is_left_behind() -> Outcome:
    """Two halves of a batch hand a baton to and fro; the one that has it raises."""

    def run() -> str:
        batons = [threading.Event(), threading.Event()]
        released = threading.Event()

        def half(mine: int) -> None:
            batons[mine].wait(TIMEOUT_S)
            if released.is_set():
                return
            if mine == 0:
                raise MicrobatchError("the first half")
            batons[0].set()

        parked = threading.Thread(target=half, args=(1,), daemon=True)
        parked.start()
        batons[0].set()
        try:
            in_threads([lambda: half(0)])
        except MicrobatchError as error:
            # Whoever could have handed the baton on is gone.
            stuck = parked.is_alive() and not batons[1].is_set()
            released.set()
            batons[1].set()
            parked.join()
            if stuck:
                raise DeadlockError(f"{error} raised, the second waits for its baton") from None
        return "both ended"

    return outcome_of(run)


def the_other_path_is_closed() -> Outcome:
    """A forward pass raises: the error itself reaches the caller, and what the other path had
    under way has been closed by then."""

    def run() -> str:
        open_passes = set[tuple[str, int]]()

        async def fragile(path: Path, rank: int, stamp: Stamp) -> None:
            open_passes.add((path.name, rank))
            try:
                if (path.name, rank, stamp.nth) == ("decode", 1, 1):
                    op = path.program[0]
                    payload = stamp.message(path.name, 0, rank)
                    await perform(Gather(role=op.role, stage=op.stage, payload=payload))
                    raise MicrobatchError("decode on rank 1")
                await stamped(path, rank, stamp)
            finally:
                open_passes.discard((path.name, rank))

        try:
            run_stamped(forward=fragile)
        except MicrobatchError as error:
            if open_passes:
                raise DeadlockError(f"{sorted(open_passes)} are left open") from None
            return f"{error} raised, nothing is left open"
        raise WrongDataError("nothing was raised")

    return outcome_of(run)


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=30,
        url="https://github.com/pytorch/pytorch/issues/175145",
        title="a thread for transfers and one for reductions launch on the same device",
        how="threads",
        expected="hang",
        unsafe=two_launching_threads,
        ours=one_launching_thread,
    ),
    Hazard(
        row=33,
        url="https://github.com/ROCm/rccl/pull/1600",
        title="two host threads race to launch two communicators",
        how="threads",
        expected="hang",
        unsafe=host_threads_race,
        ours=one_launching_thread,
    ),
    Hazard(
        row=35,
        url="https://github.com/vllm-project/vllm/pull/55586",
        title="one half of a batch raises and its parked peer waits for ever",
        how="threads",
        expected="hang",
        unsafe=a_parked_thread_is_left_behind,
        ours=the_other_path_is_closed,
    ),
)
