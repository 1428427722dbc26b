"""A rank's part in its tensor-parallel group: one leads, the others follow its descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from interlace.comm.announcement import announce
from interlace.comm.collectives import Finishing
from interlace.comm.communicator import Communicator
from interlace.comm.path import Path
from interlace.comm.plan import StepPlan
from interlace.comm.proposal import Proposal
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput
from interlace.moe.sampler import SampleRow, sample
from interlace.moe.to_device import to_host

from .batching import describe
from .changed import Changed
from .inbox import Inbox
from .messages import (
    Abort,
    Event,
    Pause,
    Resume,
    Stop,
    Told,
    TurnRequest,
    TurnResult,
    UpdateMode,
    decode_told,
    encode,
)
from .scheduler import Scheduler
from .sequence import Drawn
from .sequence import Sequence as Turn
from .shipment import Shipment
from .transfer import Transferred

Descriptions = dict[str, Description | Shipment]
Output = ForwardOutput | Transferred


class Part(Protocol):
    """What the loop of a rank asks of its part."""

    leads: bool

    @property
    def num_preemptions(self) -> int:
        """Sequences that gave their blocks back, so far."""
        ...

    @property
    def num_recomputed(self) -> int:
        """Rows prefilled of tokens that had been forwarded before, so far."""
        ...

    @property
    def sampled(self) -> tuple[int, ...]:
        """Trajectories that were given a token in this step, which is not agreed yet."""
        ...

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        """Take in what has arrived and say what this rank could do."""
        ...

    def commit(self, plan: StepPlan) -> None:
        """The exchange agreed on the last step and on this plan."""
        ...

    async def describe(self, plan: StepPlan, finishing: Finishing) -> Descriptions:
        """What goes over the group's paths that start; the same on every rank of the group."""
        ...

    def complete(self, path: str, output: Output, version: int) -> None:
        """A path's forward pass returned."""
        ...

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        """Behind this step the weights of `version` are in use; nothing is in flight."""
        ...


class Side(Protocol):
    """What a leader does beyond scheduling where prefill and decode have different ranks."""

    is_home: bool
    """Turns live here: a token counts where it arrives, not where it was sampled for others."""

    def propose(self, proposal: Proposal) -> Proposal:
        """The scheduler's proposal, and what there is to send."""
        ...

    def abort(self, trajectory: int) -> None:
        """The trajectory's turn is not wanted any more; the scheduler has been told."""
        ...

    def commit(self, results: list[TurnResult]) -> list[TurnResult]:
        """The scheduler's results are agreed; the answer is those to be told."""
        ...

    def ship(self) -> Shipment:
        """A transfer starts: what goes with it."""
        ...

    def receive(self, letters: Sequence[tuple[int, bytes]]) -> None:
        """It has ended: who wrote what. Provisional like all that a step has brought."""
        ...

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        """Weights have changed: the scheduler's part of it, and that of what is under way."""
        ...


class Leader:
    """Owns the group's scheduler: takes requests, forms batches, samples, sends results."""

    leads = True

    def __init__(
        self,
        *,
        paths: Mapping[str, Path],
        scheduler: Scheduler,
        inbox: Inbox,
        emit: Callable[[Event], None],
        followers: Communicator | None,
        side: Side | None = None,
    ) -> None:
        """`paths`: those its group takes part in. `followers`: the group's control communicator;
        None where the leader is alone. `side`: None where every group prefills and decodes."""
        self.scheduler = scheduler
        self._paths, self._inbox, self._emit = paths, inbox, emit
        self._followers, self._side = followers, side

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def num_recomputed(self) -> int:
        return self.scheduler.num_recomputed

    @property
    def sampled(self) -> tuple[int, ...]:
        at_home = self._side is None or self._side.is_home
        return self.scheduler.sampled if at_home else ()

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        for command in self._inbox.drain():
            match command:
                case TurnRequest():
                    self.scheduler.submit(command)
                case Abort():
                    self._abort(command.trajectory)
                case Pause():
                    self.scheduler.pause()
                    if command.mode == "abort":
                        for trajectory in self.scheduler.trajectories:
                            self._abort(trajectory)
                case Resume():
                    self.scheduler.resume()
                case Stop():
                    self.scheduler.stop()
        proposal = self.scheduler.propose(rank=rank, hashes=hashes)
        return proposal if self._side is None else self._side.propose(proposal)

    def commit(self, plan: StepPlan) -> None:
        self.tell_results()
        if plan.drop:
            self.scheduler.drop_prefill()

    def tell_results(self) -> None:
        """Take what forward passes gave as real."""
        results = self.scheduler.commit()
        for held in self.scheduler.held():
            self._emit(held)
        for result in results if self._side is None else self._side.commit(results):
            self._emit(result)

    async def describe(self, plan: StepPlan, finishing: Finishing) -> Descriptions:
        mine = [name for name in plan.start if name in self._paths]
        batches = {
            name: describe(self.scheduler, self._paths[name].work)
            for name in mine
            if self._paths[name].work != ("transfer",)
        }
        # After decode has grown: a block that is to be copied must not be taken before it is.
        shipments = {
            name: self._side.ship()
            for name in mine
            if name not in batches and self._side is not None
        }
        if self._followers is not None and plan.start:
            told = encode(Told(batches=batches, shipments=shipments))
            await announce(self._followers, told, _where(plan), finishing)
        return {**batches, **shipments}

    def complete(self, path: str, output: Output, version: int) -> None:
        if isinstance(output, Transferred):
            assert self._side is not None
            self._side.receive(output.letters)
            return
        logits_SV, on_host = to_host(output.logits_SV, output.experts_TLK)
        experts_TLK = on_host.numpy()
        first_row = first_sample = 0
        for kind in self._paths[path].work:
            rows = [_sample_row(turn) for turn in self.scheduler.sampling_rows(kind)]
            num_rows = self.scheduler.num_rows(kind)
            logits = logits_SV
            if len(rows) < logits_SV.shape[0]:
                logits = logits_SV[first_sample : first_sample + len(rows)]
            sampled = sample(logits, rows)
            drawn = [
                Drawn(item.token, item.logprob_raw, item.logprob, item.done_choice)
                for item in sampled
            ]
            experts = experts_TLK[first_row : first_row + num_rows]
            self.scheduler.take(kind, drawn, experts, version)
            first_sample += len(rows)
            first_row += num_rows

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        changes = self.scheduler if self._side is None else self._side
        return changes.updated(version, mode)

    def _abort(self, trajectory: int) -> None:
        self.scheduler.abort(trajectory)
        if self._side is not None:
            self._side.abort(trajectory)


class Follower:
    """Owns no scheduler state: proposes nothing and runs what its leader describes."""

    leads = False
    num_preemptions = num_recomputed = 0
    sampled: tuple[int, ...] = ()

    def __init__(self, leader: Communicator) -> None:
        """`leader`: the group's control communicator, whose first member leads."""
        self._leader = leader

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        return Proposal(rank=rank, leader=False, hashes=hashes)

    def commit(self, plan: StepPlan) -> None:
        pass

    async def describe(self, plan: StepPlan, finishing: Finishing) -> Descriptions:
        if not plan.start:
            return {}
        told = decode_told(await announce(self._leader, None, _where(plan), finishing))
        return {**told.batches, **told.shipments}

    def complete(self, path: str, output: Output, version: int) -> None:
        pass

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        return Changed()


def _sample_row(turn: Turn) -> SampleRow:
    request = turn.request
    params = request.sampling
    spoken = tuple(turn.spoken) if params.choices else ()
    return SampleRow(params, request.seed, request.trajectory, len(turn.token_ids), spoken)


def _where(plan: StepPlan) -> str:
    return f"step {plan.step}: the leader's description of {', '.join(plan.start)}"
