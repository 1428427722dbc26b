"""A leader whose group decodes while others prefill: turns go out as jobs and come back begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from interlace.comm.proposal import Proposal

from .changed import Changed
from .letters import Job, Missing, Supplied, decode_letter, encode_letter
from .messages import Abort, TurnResult, UpdateMode
from .outbox import Delivery, Outbox
from .scheduler import Scheduler
from .sequence import Sequence as Turn
from .shipment import Shipment


class DecodeSide:
    """What its scheduler would prefill is sent away, with blocks for it reserved here.

    A turn that has gone away comes back once, prefilled or aborted. Until then its blocks belong to
    it whatever happens, since others write into them: also when weights change. Then those who
    prefill abort by themselves what they have no token for yet, and it is sent away again.
    """

    is_home = True

    def __init__(
        self, *, scheduler: Scheduler, outbox: Outbox, prefill_leaders: Sequence[int]
    ) -> None:
        """`prefill_leaders`: ranks; each trajectory is prefilled by one of them."""
        self._scheduler, self._blocks = scheduler, scheduler.blocks
        self._outbox, self._prefill_leaders = outbox, tuple(prefill_leaders)

    def propose(self, proposal: Proposal) -> Proposal:
        return replace(
            proposal,
            waiting_tokens=0,
            waiting_steps=0,
            transfer_rows=proposal.waiting_tokens + self._outbox.num_rows,
            idle=proposal.idle and self._outbox.is_empty,
        )

    def abort(self, trajectory: int) -> None:
        """Tell those who prefill it, if anybody does."""
        if self._scheduler.away(trajectory) is not None:
            letter = encode_letter(Abort(trajectory=trajectory))
            self._outbox.add(Delivery(to=self._prefills(trajectory), letter=letter))

    def commit(self, results: list[TurnResult]) -> list[TurnResult]:
        """All results of the scheduler are real ones."""
        return results

    def ship(self) -> Shipment:
        copies: list[tuple[int, int]] = []
        for sequence in self._scheduler.depart():
            assert sequence.lease is not None
            copies += self._blocks.copies_of(sequence.lease)
            to = self._prefills(sequence.request.trajectory)
            self._outbox.add(Delivery(to=to, letter=encode_letter(self._job(sequence))))
        return self._outbox.pack(copies)

    def receive(self, letters: Sequence[tuple[int, bytes]]) -> None:
        self._outbox.made()
        for sender, data in letters:
            match decode_letter(data):
                case TurnResult() as result:
                    self._scheduler.arrive(result)
                case Missing() as missing:
                    self._supply(sender, missing)
                case letter:
                    raise AssertionError(f"rank {sender} prefills and sent {letter}")

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        return self._scheduler.updated(version, mode)

    def _prefills(self, trajectory: int) -> int:
        return self._prefill_leaders[trajectory % len(self._prefill_leaders)]

    def _job(self, sequence: Turn) -> Job:
        assert sequence.lease is not None
        request, held = sequence.request, sequence.num_computed
        last = self._blocks.blocks_for(len(sequence.token_ids))
        one_more = replace(request.sampling, max_tokens=len(sequence.generated) + 1)
        return Job(
            request=msgspec.structs.replace(
                request, sampling=one_more, experts_from=held, holds=[]
            ),
            generated=sequence.generated,
            num_forwarded=sequence.num_forwarded,
            blocks=sequence.lease.block_table[held // self._blocks.block_size : last],
            weights=self._scheduler.kv.stamp,
        )

    def _supply(self, sender: int, missing: Missing) -> None:
        sequence = self._scheduler.away(missing.trajectory)
        assert sequence is not None, f"trajectory {missing.trajectory} is not away"
        assert sequence.lease is not None
        first, held = missing.first, sequence.num_computed
        experts = sequence.experts[first * self._blocks.block_size : held]
        letter = Supplied(trajectory=missing.trajectory, experts=experts.tobytes())
        self._outbox.add(
            Delivery(
                to=sender,
                letter=encode_letter(letter),
                blocks=sequence.lease.block_table[first : self._blocks.blocks_for(held)],
                into=missing.blocks,
            )
        )
