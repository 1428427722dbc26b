"""Many seeds on all cores: what was run, what was found, and how much of it was different."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from . import faults
from .mutants import MUTANTS, Death, hunt
from .properties import check
from .scenario import scenario
from .simulation import Simulation

CHUNK = 100
"""Seeds a process takes at a time."""
FAULT_EVERY = 16
"""One seed in so many is run a second time with a fault in it."""
MOST_FAILURES = 20
"""A campaign that has found so many ends."""


@dataclass(slots=True)
class Tally:
    """What some seeds came to; tallies of different seeds add up."""

    seeds: int = 0
    tickets: int = 0
    steps: int = 0
    interleavings: set[int] = field(default_factory=set)
    """Hashes of schedules: which rank went on, at every tick."""
    events: Counter[str] = field(default_factory=Counter)
    """Of the runs without a fault: seeds in which each happened."""
    faults: Counter[str] = field(default_factory=Counter)
    """By kind: runs that came to the fault and ended as they must."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was violated)."""

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.tickets += other.tickets
        self.steps += other.steps
        self.interleavings |= other.interleavings
        self.events += other.events
        self.faults += other.faults
        self.failures += other.failures


def run_seeds(seeds: Sequence[int]) -> Tally:
    """One seed after the other, in this process."""
    tally = Tally()
    gc.disable()  # a run leaves cycles behind; they are collected between chunks
    try:
        for seed in seeds:
            _run_seed(seed, tally)
    finally:
        gc.enable()
        gc.collect()
    return tally


def replay(seed: int) -> None:
    """What a campaign does with this seed; raises what it finds."""
    run = Simulation(scenario(seed))
    run.run()
    check(run)
    for kind in faults.KINDS:
        faults.provoke(seed, kind)


def campaign(
    first: int, num: int, *, workers: int = 0, on_chunk: Callable[[Tally], None] | None = None
) -> Tally:
    """The seeds from `first` on, on `workers` processes (0: one a core).

    `on_chunk` is told of every chunk as it ends.
    """
    total = Tally()
    chunks = (range(at, min(at + CHUNK, first + num)) for at in range(first, first + num, CHUNK))
    with _pool(workers) as pool:
        for tally in _in_any_order(pool, chunks, 2 * (workers or _cores())):
            total.add(tally)
            if on_chunk is not None:
                on_chunk(tally)
            if len(total.failures) >= MOST_FAILURES:
                break
    total.failures.sort()
    return total


def hunt_all(*, workers: int = 0) -> list[Death | None]:
    """How each mutant died, in their order; None for one that lives."""
    with _pool(workers) as pool:
        return list(pool.map(_hunt, range(len(MUTANTS))))


def _hunt(nth: int) -> Death | None:
    return hunt(MUTANTS[nth])


def _run_seed(seed: int, tally: Tally) -> None:
    tally.seeds += 1
    what = f"seed {seed}"
    try:
        run = Simulation(scenario(seed))
        run.run()
        check(run)
        _note(run, tally)
        if seed % FAULT_EVERY == 0:
            kind = faults.KINDS[seed // FAULT_EVERY % len(faults.KINDS)]
            what = f"seed {seed} with a fault ({kind})"
            tally.faults[kind] += faults.provoke(seed, kind)
    except Exception as error:
        tally.failures.append((seed, f"{what}: {type(error).__name__}: {error}"))


def _note(run: Simulation, tally: Tally) -> None:
    book = run.book
    plans, results = book.plans[0], book.results
    tally.tickets += sum(map(len, book.tickets))
    tally.steps += len(plans)
    digest = hashlib.blake2b(run.trace, digest_size=8, person=bytes([run.scenario.world]))
    tally.interleavings.add(int.from_bytes(digest.digest(), "little"))
    happened = {
        "both paths in one step": any(len({t.path for t in p.tickets}) > 1 for p in plans),
        "turn aborted": any(result.finish == "aborted" for result in results),
        "prefill dropped": any(plan.drop for plan in plans),
        "weights updated": any(plan.update for plan in plans),
        "update drains a prefill": any(set(p.finish) - set(p.start) for p in plans if p.update),
        "output of several versions": any(len(set(result.versions)) > 1 for result in results),
        "prefix found in the cache": any(result.cached_tokens for result in results),
        "delayed messages": bool(run.scenario.delays),
        "over the window": run.scenario.window,
        "serial device": bool(run.scenario.serial_slots) and not run.scenario.window,
        "groups that intersect": run.scenario.halves or run.scenario.tp > 1,
    }
    tally.events.update(name for name, so in happened.items() if so)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(workers: int) -> ProcessPoolExecutor:
    """Processes forked from one that has imported everything and started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(workers or _cores(), mp_context=context, initializer=_end_with_us)


def _end_with_us() -> None:
    """In a worker: however the process that asked ends, this one does not stay behind."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_any_order(pool: ProcessPoolExecutor, chunks: Iterator[range], most: int) -> Iterator[Tally]:
    """Tallies as they are ready; at most so many chunks are given out at a time."""
    running: set[Future[Tally]] = set()
    for chunk in chunks:
        running.add(pool.submit(run_seeds, chunk))
        if len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)
