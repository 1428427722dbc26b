"""A group that does all the work, in a loop as the plan would have it, over a cache of numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.rollout.cells import Group, Truth, check_age, check_truth

from interlace.rollout.changed import Changed
from interlace.rollout.kv_versions import KVVersions, Reuse
from interlace.rollout.messages import Held, TurnRequest, TurnResult, UpdateMode


@dataclass(kw_only=True)
class OneSide:
    """A leader alone. Prefills take one to three steps, drawn from `seed`."""

    blocks: int = 64
    chunk: int = 8
    running: int = 4
    reuse: Reuse = "current"
    max_staleness: int | None = None
    seed: int = 0
    requests: dict[int, TurnRequest] = field(default_factory=dict)
    results: list[TurnResult] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.group = Group(
            blocks=self.blocks,
            chunk=self.chunk,
            running=self.running,
            kv=KVVersions(max_staleness=self.max_staleness, reuse=self.reuse),
        )
        self.scheduler = self.group.scheduler

    @property
    def version(self) -> int:
        return self.group.version

    def submit(self, request: TurnRequest) -> None:
        self.requests[request.trajectory] = request
        self.scheduler.submit(request)

    @property
    def truth(self) -> dict[tuple[int, int], Truth]:
        return self.group.truth

    def abort(self, trajectory: int) -> None:
        self.scheduler.abort(trajectory)

    def step(self) -> bool:
        """False if there was nothing to do."""
        group, scheduler = self.group, self.scheduler
        proposal = scheduler.propose(rank=0, hashes=())
        results = scheduler.commit()
        self.held += scheduler.held()
        for result in results:
            check_truth(self.requests[result.trajectory], result, group.truth)
            check_age(result, group.numbers, self.max_staleness)
        self.results += results
        if "prefill" in group.flights and not proposal.live_rows:
            del group.flights["prefill"]
            scheduler.drop_prefill()
        if proposal.decode_rows:
            rows = scheduler.describe_decode()
            assert rows.num_rows <= proposal.decode_rows, "proposals are upper bounds"
            group.forward("decode", rows, 1)
        if proposal.waiting_tokens and "prefill" not in group.flights:
            rows = scheduler.describe_prefill()
            group.forward("prefill", rows, self.random.randint(1, 3))
        busy = bool(group.flights)
        for work in list(group.flights):
            group.land(work)
        scheduler.blocks.check_integrity()
        return busy or bool(results)

    def update(self, mode: UpdateMode, version: int | None = None) -> Changed:
        """At the end of a step, which has ended all that was in flight."""
        self.group.end_flights()
        number = self.version + 1 if version is None else version
        self.group.install(number, same=mode == "same")
        changed = self.scheduler.updated(number, mode)
        self.scheduler.blocks.check_integrity()
        return changed

    def run(self, *, steps: int = 400) -> list[TurnResult]:
        """Until nothing moves any more; the results since the last time."""
        self.results.clear()
        for _ in range(steps):
            if not (self.step() or self.step()):
                return list(self.results)
        raise AssertionError(f"still busy after {steps} steps")
