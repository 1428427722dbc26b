"""One rank's loop: propose, exchange, commit, describe, walk, sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from interlace.comm.agreement import agree
from interlace.comm.collectives import Forward, Park, perform
from interlace.comm.communicator import Communicator
from interlace.comm.journal import Journal, StepRecord
from interlace.comm.plan import PlanConfig, PlanState, StepPlan
from interlace.comm.sequencer import Sequencer
from interlace.moe.context import PathContext
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.sampler import SampleRow, sample
from interlace.moe.weights import Weights

from .inbox import Inbox
from .messages import Abort, Event, Stop, TurnRequest
from .scheduler import Drawn, Scheduler


class Engine:
    """The loop of one rank, which leads its own data-parallel group.

    Made of parts that are ready; suspends only on Finish and Park, so the same loop runs under the
    blocking driver of a process and, for many ranks, in a LocalWorld.
    """

    def __init__(
        self,
        *,
        rank: int,
        config: PlanConfig,
        sequencer: Sequencer,
        control: Communicator,
        model: Model,
        weights: Weights,
        contexts: Mapping[str, PathContext],
        scheduler: Scheduler,
        inbox: Inbox,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.state = PlanState()
        self._paths = {path.name: path for path in config.paths}
        self._config, self._sequencer, self._control = config, sequencer, control
        self._model, self._weights, self._contexts = model, weights, contexts
        self._inbox, self._emit, self._clock = inbox, emit, clock

    @property
    def journal(self) -> Journal:
        return self._sequencer.journal

    async def run(self) -> Journal:
        """Step until all ranks have agreed to stop; returns what was done."""
        try:
            while await self.step():
                pass
        finally:
            self._sequencer.close()
        return self.journal

    async def step(self) -> bool:
        """One step; False once the ranks have agreed to stop."""
        began_at = self._clock()
        waited_before = self._sequencer.waited_s
        self._take_in()
        proposal = self.scheduler.propose(rank=self.rank, hashes=self._sequencer.hashes)
        asked_at = self._clock()
        agreement = await agree(
            self._control, self.state, proposal, self._config, self._sequencer.keys
        )
        waited = self._clock() - asked_at
        plan = agreement.plan
        for result in self.scheduler.commit():
            self._emit(result)
        if plan.stop:
            return False
        if plan.drop:
            self.scheduler.drop_prefill()
        started, rows = self._start(plan)
        outputs = await self._sequencer.walk(plan, started)
        for name in plan.finish:
            self._complete(name, outputs[name], plan.version)
        self.state = plan.after
        if plan.park_ms:
            parked_at = self._clock()
            await perform(Park(ms=plan.park_ms))
            waited += self._clock() - parked_at
        self.journal.steps.append(
            StepRecord(
                step=plan.step,
                version=plan.version,
                began_at=began_at,
                ended_at=self._clock(),
                decoding=plan.decoding,
                started=plan.start,
                finished=plan.finish,
                rows=rows,
                num_tickets=tuple((name, plan.count(name)) for name in self._paths),
                control_bytes=agreement.num_bytes,
                waited_s=waited + self._sequencer.waited_s - waited_before,
                parked_ms=plan.park_ms,
            )
        )
        return True

    def _take_in(self) -> None:
        for command in self._inbox.drain():
            match command:
                case TurnRequest():
                    self.scheduler.submit(command)
                case Abort():
                    self.scheduler.abort(command.trajectory)
                case Stop():
                    self.scheduler.stop()

    def _start(self, plan: StepPlan) -> tuple[dict[str, Forward], tuple[tuple[str, int], ...]]:
        started: dict[str, Forward] = {}
        rows = []
        for name in plan.start:
            if "decode" in self._paths[name].work:
                description = self.scheduler.describe_decode()
            else:
                description = self.scheduler.describe_prefill()
            context = self._contexts[name]
            started[name] = self._model.forward(self._weights, context, description)
            rows.append((name, description.num_rows))
        return started, tuple(rows)

    def _complete(self, name: str, output: ForwardOutput, version: int) -> None:
        work = self._paths[name].work[0]
        rows = [
            SampleRow(
                params=sequence.request.sampling,
                seed=sequence.request.seed,
                trajectory=sequence.request.trajectory,
                position=len(sequence.token_ids),
                generated=tuple(sequence.generated),
            )
            for sequence in self.scheduler.sampling_rows(work)
        ]
        with torch.inference_mode():
            sampled = sample(output.logits_SV, rows)
        drawn = [
            Drawn(
                token=item.token,
                logprob_raw=item.logprob_raw,
                logprob=item.logprob,
                ends_choice=item.done_choice,
            )
            for item in sampled
        ]
        self.scheduler.take(work, drawn, output.experts_TLK.cpu().numpy(), version)
