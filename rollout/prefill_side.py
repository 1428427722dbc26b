"""A leader whose group prefills for others: jobs come in and go back one token longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from interlace.comm.proposal import Proposal

from .block_manager import Lease
from .changed import Changed
from .content import Content
from .letters import Job, Missing, Supplied, decode_letter, encode_letter
from .messages import Abort, TurnResult, UpdateMode
from .outbox import Delivery, Outbox
from .scheduler import Scheduler
from .sequence import Sequence as Turn
from .shipment import Shipment


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """One job on its way through this group."""

    job: Job
    delivery: Delivery
    """To its home: blocks as soon as they are complete, the result with the last of them."""
    lease: Lease | None = None
    """Blocks for what this group is missing, until it has them."""
    supplied: bytes | None = None
    """The experts of what was missing."""
    sequence: Turn | None = None
    """Its turn here; None as long as something is missing."""
    aborted: bool = False

    @property
    def has_token(self) -> bool:
        """The one it is there for; what is left is to send it home."""
        return self.sequence is not None and self.sequence.num_drawn > 0


class PrefillSide:
    """To its scheduler a job is a turn that ends with the next token.

    What home holds and this group does not, tokens that were decoded there, is asked for before the
    turn is queued. It is published in the prefix tree like all that is computed here, and may be
    evicted like it: then it is computed again. Blocks of a turn that has ended stay locked until
    they have left.
    """

    is_home = False

    def __init__(self, *, scheduler: Scheduler, outbox: Outbox) -> None:
        self._scheduler, self._blocks = scheduler, scheduler.blocks
        self._outbox = outbox
        self._works: dict[int, _Work] = {}
        self._landed: list[_Work] = []
        scheduler.stop()  # whether there will be more is for those to say who send jobs

    def propose(self, proposal: Proposal) -> Proposal:
        """Nobody decodes here: a sampled token only has to leave."""
        self._extend_deliveries()
        return replace(
            proposal,
            decode_rows=0,
            transfer_rows=proposal.decode_rows + self._outbox.num_rows,
            idle=proposal.idle and not self._works and self._outbox.is_empty,
        )

    def abort(self, trajectory: int) -> None:
        """End the job as aborted, if it is still here."""
        work = self._works.get(trajectory)
        if work is not None:
            work.aborted = True
            self._scheduler.abort(trajectory)

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        """What has its token goes home with it, as of the version that has sampled it. All else
        was begun with keys and values, here and at home, of weights that have gone."""
        same = mode == "same"
        self._scheduler.install(version, same=same)
        begun = [] if same else [work for work in self._works.values() if not work.has_token]
        for work in begun:
            self.abort(work.job.request.trajectory)
        sequences = [work.sequence for work in begun if work.sequence is not None]
        again = 0 if mode == "abort" else sum(sequence.num_computed for sequence in sequences)
        return Changed(dropped_tokens=again)

    def commit(self, results: list[TurnResult]) -> list[TurnResult]:
        """The scheduler's results go home; nobody else hears of them."""
        for work in self._landed:
            self._publish(work)
        self._landed.clear()
        for result in results:
            self._send_home(self._works.pop(result.trajectory), result)
        return []

    def ship(self) -> Shipment:
        self._extend_deliveries()
        return self._outbox.pack()

    def receive(self, letters: Sequence[tuple[int, bytes]]) -> None:
        for delivery in self._outbox.made():
            self._blocks.tree.unlock(delivery.nodes)
        for sender, data in letters:
            match decode_letter(data):
                case Job() as job:
                    self._take(sender, job)
                case Abort() as abort:
                    self.abort(abort.trajectory)
                case Supplied() as supplied:
                    work = self._works[supplied.trajectory]
                    work.supplied = supplied.experts
                    self._landed.append(work)
                    self._queue(work)
                case letter:
                    raise AssertionError(f"rank {sender} decodes and sent {letter}")

    # ---- inside

    def _take(self, home: int, job: Job) -> None:
        delivery = Delivery(to=home, into=job.blocks)
        late = job.weights != self._scheduler.kv.stamp
        work = _Work(job=job, delivery=delivery, aborted=late)
        self._works[job.request.trajectory] = work
        self._outbox.add(delivery)
        if late or not self._ask(work):
            self._queue(work)

    def _ask(self, work: _Work) -> bool:
        """Ask for what home holds and this group does not; False if there is no need or no room."""
        job, tokens = work.job, work.job.token_ids
        match = self._blocks.match(tokens, job.num_held)
        if match.num_tokens(self._blocks.block_size) >= job.num_held:
            return False
        # The last token is left to compute, so this leaves what home holds.
        lease = self._blocks.lease(tokens[: job.num_held + 1], job.num_held)
        if lease is None:
            return False
        self._blocks.copies_of(lease)  # not needed: that block is sent as a whole
        work.lease = lease
        first = len(lease.shared)
        missing = Missing(
            trajectory=job.request.trajectory, first=first, blocks=lease.block_table[first:]
        )
        self._outbox.add(Delivery(to=work.delivery.to, letter=encode_letter(missing)))
        return True

    def _queue(self, work: _Work) -> None:
        job = work.job
        work.sequence = self._scheduler.submit(
            job.request, generated=job.generated, num_forwarded=job.num_forwarded
        )
        if work.aborted:
            self._scheduler.abort(job.request.trajectory)

    def _publish(self, work: _Work) -> None:
        """What was missing goes into the prefix tree, where the turn finds it."""
        lease, sequence = work.lease, work.sequence
        assert lease is not None
        assert sequence is not None
        assert work.supplied is not None
        held = work.job.num_held
        experts = np.zeros((held, *sequence.experts.shape[1:]), np.uint8)
        first = len(lease.shared) * self._blocks.block_size
        experts[first:] = np.frombuffer(work.supplied, np.uint8).reshape(experts[first:].shape)
        content = Content(
            tokens=work.job.token_ids[:held], experts=experts, weights=[work.job.weights] * held
        )
        self._blocks.give_back(lease, content)
        work.lease = None

    def _extend_deliveries(self) -> None:
        """Blocks leave while those behind them are being computed."""
        size = self._blocks.block_size
        for work in self._works.values():
            if work.sequence is not None and work.sequence.lease is not None:
                table = work.sequence.lease.block_table
                complete = work.sequence.num_computed // size
                work.delivery.blocks = table[work.job.num_held // size : complete]

    def _send_home(self, work: _Work, result: TurnResult) -> None:
        delivery, tree = work.delivery, self._blocks.tree
        if result.finish == "aborted":
            del delivery.blocks[delivery.num_sent :]
        else:
            tokens = work.job.token_ids
            # not the block manager's match: weights may have changed since the token was sampled
            match = tree.match(tokens, len(tokens), oldest=work.job.weights)
            delivery.nodes = [*match.nodes, *([match.partial] if match.partial else [])]
            assert match.num_tokens(self._blocks.block_size) == len(tokens)
            tree.lock(delivery.nodes)
            first = work.job.num_held // self._blocks.block_size
            delivery.blocks = [node.block for node in delivery.nodes][first:]
        delivery.letter = encode_letter(result)
