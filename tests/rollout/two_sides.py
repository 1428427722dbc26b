"""A group that prefills and groups that decode, in one loop, over caches made of numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.rollout.cells import SIZE, Group, Truth, check, expected, turn

from interlace.rollout.changed import Changed
from interlace.rollout.decode_side import DecodeSide
from interlace.rollout.kv_versions import KVVersions
from interlace.rollout.messages import Held, TurnRequest, TurnResult, UpdateMode
from interlace.rollout.outbox import Outbox
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.shipment import Shipment

__all__ = ["SIZE", "TwoSides", "check", "expected", "turn"]


@dataclass(kw_only=True)
class TwoSides:
    """One group that prefills; the others decode. Ranks are places in `groups`."""

    num_homes: int = 1
    blocks: tuple[int, int] = (64, 64)
    """Of the group that prefills, and of the others."""
    chunk: int = 8
    most_blocks: int = 64
    most_letter_bytes: int = 1 << 20
    seed: int = 0
    groups: list[Group] = field(init=False)
    max_staleness: int | None = None
    results: list[TurnResult] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    truth: dict[tuple[int, int], Truth] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        first, others = self.blocks
        self.groups = [Group(blocks=first, chunk=self.chunk, truth=self.truth)]
        self.groups[0].side = PrefillSide(scheduler=self.groups[0].scheduler, outbox=self._outbox())
        for _ in range(self.num_homes):
            kv = KVVersions(max_staleness=self.max_staleness)
            group = Group(blocks=others, kv=kv, truth=self.truth)
            group.side = DecodeSide(
                scheduler=group.scheduler, outbox=self._outbox(), prefill_leaders=[0]
            )
            self.groups.append(group)

    def submit(self, request: TurnRequest) -> None:
        self.home(request.trajectory).scheduler.submit(request)

    def abort(self, trajectory: int) -> None:
        group = self.home(trajectory)
        group.scheduler.abort(trajectory)
        group.side.abort(trajectory)

    def update(self, mode: UpdateMode, version: int | None = None) -> list[Changed]:
        """At the end of a step, which has ended all that was in flight."""
        number = self.groups[0].version + 1 if version is None else version
        changes = []
        for group in self.groups:
            group.end_flights()
            group.install(number, same=mode == "same")
            changes.append(group.side.updated(number, mode))
            group.scheduler.blocks.check_integrity()
        return changes

    def home(self, trajectory: int) -> Group:
        return self.groups[1 + trajectory % self.num_homes]

    def run(self, *, steps: int = 400) -> list[TurnResult]:
        """Until everybody is idle; the results since the last time."""
        self.results.clear()
        for _ in range(steps):
            if not self.step():
                return list(self.results)
        raise AssertionError(f"no end after {steps} steps")

    def step(self) -> bool:
        """As the plan would have it; False if all are idle."""
        self.num_steps += 1
        proposals = [
            group.side.propose(group.scheduler.propose(rank=rank, hashes=()))
            for rank, group in enumerate(self.groups)
        ]
        assert proposals[0].decode_rows == 0
        assert not any(proposal.waiting_tokens for proposal in proposals[1:])
        for group in self.groups:
            results = group.scheduler.commit()
            self.held += group.scheduler.held()
            self.results += group.side.commit(results)
        first = self.groups[0]
        for group, proposal in zip(self.groups[1:], proposals[1:], strict=True):
            if proposal.decode_rows:
                group.forward("decode", group.scheduler.describe_decode(), 1)
        if proposals[0].waiting_tokens and "prefill" not in first.flights:
            rows = first.scheduler.describe_prefill()
            first.forward("prefill", rows, self.random.randint(1, 3))
        transfer = any(proposal.transfer_rows for proposal in proposals)
        if transfer:
            self._transfer()
        for group in self.groups:
            for work in list(group.flights):
                group.land(work)
            group.scheduler.blocks.check_integrity()
        return transfer or not all(proposal.idle for proposal in proposals)

    def _outbox(self) -> Outbox:
        return Outbox(most_blocks=self.most_blocks, most_letter_bytes=self.most_letter_bytes)

    def _transfer(self) -> None:
        shipments: list[Shipment] = [group.side.ship() for group in self.groups]
        for group, shipment in zip(self.groups, shipments, strict=True):
            group.num_blocks_sent += shipment.num_rows
            assert shipment.num_rows <= self.most_blocks
            for source, target in shipment.block_copies:
                group.copy(source, group, target)
        read = []
        for sender, shipment in enumerate(shipments):
            for parcel in shipment.parcels:
                blocks, group = list(parcel.blocks), self.groups[sender]
                read.append((sender, parcel, group.cells[blocks], group.written_by[blocks]))
        for _, parcel, cells, written_by in read:
            self.groups[parcel.to].cells[list(parcel.into)] = cells
            self.groups[parcel.to].written_by[list(parcel.into)] = written_by
        for rank, group in enumerate(self.groups):
            group.side.receive(
                [
                    (by, letter)
                    for by, parcel, _, _ in read
                    if parcel.to == rank
                    for letter in parcel.letters
                ]
            )
