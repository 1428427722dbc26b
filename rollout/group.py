"""A rank's part in its tensor-parallel group: one leads, the others follow its descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from interlace.comm.announcement import announce
from interlace.comm.collectives import Finishing
from interlace.comm.communicator import Communicator
from interlace.comm.path import Path
from interlace.comm.plan import StepPlan
from interlace.comm.proposal import Proposal
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput
from interlace.moe.sampler import SampleRow, sample

from .batching import describe
from .inbox import Inbox
from .messages import (
    Abort,
    Event,
    Stop,
    TurnRequest,
    decode_descriptions,
    encode,
)
from .scheduler import Drawn, Scheduler

Descriptions = dict[str, Description]


class Part(Protocol):
    """What the loop of a rank asks of its part."""

    leads: bool

    @property
    def num_preemptions(self) -> int:
        """Sequences that gave their blocks back, so far."""
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
        """The batches of the paths that start; the same on every rank of the group."""
        ...

    def complete(self, path: str, output: ForwardOutput, version: int) -> None:
        """A path's forward pass returned."""
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
    ) -> None:
        """`followers`: the group's control communicator; None where the leader is alone."""
        self.scheduler = scheduler
        self._paths, self._inbox, self._emit = paths, inbox, emit
        self._followers = followers

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def sampled(self) -> tuple[int, ...]:
        return self.scheduler.sampled

    def propose(self, rank: int, hashes: tuple[int, ...]) -> Proposal:
        for command in self._inbox.drain():
            match command:
                case TurnRequest():
                    self.scheduler.submit(command)
                case Abort():
                    self.scheduler.abort(command.trajectory)
                case Stop():
                    self.scheduler.stop()
        return self.scheduler.propose(rank=rank, hashes=hashes)

    def commit(self, plan: StepPlan) -> None:
        for result in self.scheduler.commit():
            self._emit(result)
        if plan.drop:
            self.scheduler.drop_prefill()

    async def describe(self, plan: StepPlan, finishing: Finishing) -> Descriptions:
        described = {name: describe(self.scheduler, self._paths[name].work) for name in plan.start}
        if self._followers is not None and plan.start:
            await announce(self._followers, encode(described), _where(plan), finishing)
        return described

    def complete(self, path: str, output: ForwardOutput, version: int) -> None:
        logits_SV, experts_TLK = output.logits_SV, output.experts_TLK.cpu().numpy()
        first_row = first_sample = 0
        for kind in self._paths[path].work:
            rows = [
                SampleRow(
                    params=sequence.request.sampling,
                    seed=sequence.request.seed,
                    trajectory=sequence.request.trajectory,
                    position=len(sequence.token_ids),
                    generated=tuple(sequence.generated),
                )
                for sequence in self.scheduler.sampling_rows(kind)
            ]
            num_rows = self.scheduler.num_rows(kind)
            with torch.inference_mode():
                logits = logits_SV[first_sample : first_sample + len(rows)]
                sampled = sample(logits, rows)
            drawn = [
                Drawn(
                    token=item.token,
                    logprob_raw=item.logprob_raw,
                    logprob=item.logprob,
                    ends_choice=item.done_choice,
                )
                for item in sampled
            ]
            experts = experts_TLK[first_row : first_row + num_rows]
            self.scheduler.take(kind, drawn, experts, version)
            first_sample += len(rows)
            first_row += num_rows


class Follower:
    """Owns no scheduler state: proposes nothing and runs what its leader describes."""

    leads = False
    num_preemptions = 0
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
        told = await announce(self._leader, None, _where(plan), finishing)
        return decode_descriptions(told)

    def complete(self, path: str, output: ForwardOutput, version: int) -> None:
        pass


def _where(plan: StepPlan) -> str:
    return f"step {plan.step}: the leader's description of {', '.join(plan.start)}"
