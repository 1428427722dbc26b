"""A group that prefills and groups that decode, in one loop, over a cache made of numbers.

What a position leaves in the cache is a number that depends on its token and on all numbers before
it, read from the blocks themselves; the next token follows from the last of them. A block that is
missing, misplaced or overwritten makes other tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.decode_side import DecodeSide
from interlace.rollout.group import Side
from interlace.rollout.messages import TurnRequest, TurnResult
from interlace.rollout.outbox import Outbox
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.scheduler import Drawn, Scheduler
from interlace.rollout.shipment import Shipment

SIZE = 4
STOP = 7
VOCABULARY = 40


def mix(token: int, before: Sequence[int]) -> int:
    return zlib.crc32(np.array([token, *before], np.int64).tobytes())


def expected(tokens: Sequence[int], num: int) -> list[int]:
    """The next tokens, without a cache."""
    cells: list[int] = []
    for token in tokens:
        cells.append(mix(token, cells))
    sampled: list[int] = []
    while len(sampled) < num:
        sampled.append(cells[-1] % VOCABULARY)
        if sampled[-1] == STOP:
            break
        cells.append(mix(sampled[-1], cells))
    return sampled


def turn(trajectory: int, tokens: Sequence[int], num: int, *, known: int = 0) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=list(tokens),
        seed=0,
        experts_from=known,
        sampling=SamplingParams(max_tokens=num, stop_token_ids=(STOP,)),
    )


class Group:
    """One leader with its scheduler and a cache of its own."""

    def __init__(self, *, blocks: int, chunk: int = 8, running: int = 4) -> None:
        self.scheduler = Scheduler(
            blocks=BlockManager(num_blocks=blocks, block_size=SIZE),
            chunk_tokens=chunk,
            max_running=running,
            max_context=200,
            expert_shape=(1, 1),
            text_of=lambda _: "",
        )
        self.cells = np.zeros((blocks, SIZE), np.int64)
        self.side: Side
        self.flights: dict[str, tuple[Description, list[int], int]] = {}
        """Kind of work -> its rows, the tokens drawn, and the steps it still takes."""
        self.num_blocks_sent = 0

    def forward(self, work: str, rows: Description, num_steps: int) -> None:
        """Write at once; whoever reads too early is found by what he reads."""
        for source, target in rows.block_copies:
            self.cells[target] = self.cells[source]
        last: list[int] = []
        bounds = rows.cu_seqlens_q
        for table, start, stop in zip(rows.block_tables, bounds, bounds[1:], strict=False):
            cells = self.cells[list(table)].reshape(-1)
            for row in range(start, stop):
                at = rows.positions[row]
                cells[at] = mix(rows.input_ids[row], cells[:at].tolist())
                self.cells[table[at // SIZE], at % SIZE] = cells[at]
                last.append(int(cells[at]))
        drawn = [last[row] % VOCABULARY for row in rows.sample_rows]
        self.flights[work] = rows, drawn, num_steps

    def land(self, work: str) -> None:
        rows, drawn, num_steps = self.flights.pop(work)
        if num_steps > 1:
            self.flights[work] = rows, drawn, num_steps - 1
            return
        experts = np.array(rows.input_ids, np.uint8).reshape(-1, 1, 1)
        samples = [
            Drawn(token=token, logprob_raw=-token, logprob=-token / 2, ends_choice=False)
            for token in drawn
        ]
        self.scheduler.take(work, samples, experts, 0)


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
    results: list[TurnResult] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        first, others = self.blocks
        self.groups = [Group(blocks=first, chunk=self.chunk)]
        self.groups[0].side = PrefillSide(scheduler=self.groups[0].scheduler, outbox=self._outbox())
        for _ in range(self.num_homes):
            group = Group(blocks=others)
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
            self.results += group.side.commit(group.scheduler.commit())
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
                group.cells[target] = group.cells[source]
        read = [
            (sender, parcel, self.groups[sender].cells[list(parcel.blocks)])
            for sender, shipment in enumerate(shipments)
            for parcel in shipment.parcels
        ]
        for _, parcel, cells in read:
            self.groups[parcel.to].cells[list(parcel.into)] = cells
        for rank, group in enumerate(self.groups):
            group.side.receive(
                [
                    (by, letter)
                    for by, parcel, _ in read
                    if parcel.to == rank
                    for letter in parcel.letters
                ]
            )


def check(request: TurnRequest, result: TurnResult) -> None:
    """The tokens, and that each forwarded token has its own experts."""
    wanted = expected(request.token_ids, request.sampling.max_tokens)
    assert result.token_ids == wanted[: len(result.token_ids)]
    assert result.finish == "aborted" or result.token_ids == wanted
    assert result.logprobs == [-token / 2 for token in result.token_ids]
    forwarded = [*request.token_ids, *result.token_ids]
    experts = np.frombuffer(result.experts, np.uint8).tolist()
    start = request.experts_from
    assert experts == forwarded[start : start + len(experts)]
    if result.finish != "aborted":
        assert start + len(experts) == len(forwarded) - 1
