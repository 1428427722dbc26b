"""One rank's loop: propose, exchange, commit, describe, walk, complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from interlace.comm.agreement import agree
from interlace.comm.collectives import Forward, Park, perform
from interlace.comm.communicator import Communicator
from interlace.comm.journal import Journal, StepRecord
from interlace.comm.plan import PlanConfig, PlanState, StepPlan
from interlace.comm.sequencer import Sequencer
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.model import Model
from interlace.moe.weights import Weights

from .batching import max_rows
from .changed import Changed
from .group import Part
from .messages import UpdateMode
from .shipment import Shipment
from .transfer import transfer


class Updates(Protocol):
    """Where new weights come from."""

    def ready(self) -> int:
        """The newest version that this rank holds complete and checked; 0 if there is none.

        Installed is the newest that all ranks hold, so every one between that in use and this
        must still be held.
        """
        ...

    def mode_of(self, version: int) -> UpdateMode:
        """What becomes of the turns that run when `version` is installed; the same on all ranks."""
        ...

    def install(self, version: int) -> Weights:
        """The weights of `version`, in use from now on. All ranks call it at the same step."""
        ...

    def installed(self, version: int, *, step: int, stall_s: float, changed: Changed) -> None:
        """It is done, and the loop goes on. `stall_s`: how long this rank did nothing else;
        `changed`: what became of its group's turns."""
        ...


class Engine:
    """The loop of one rank, whatever its part in its tensor-parallel group.

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
        part: Part,
        chunk_tokens: int,
        clock: Callable[[], float],
        epoch: int = 0,
        updates: Updates | None = None,
    ) -> None:
        """`chunk_tokens`: most prefill rows of any group's batch, the same on all ranks.
        `epoch`: counts the sets of communicators; what an earlier one left behind is refused."""
        self.rank = rank
        self.part = part
        self.state = PlanState(epoch=epoch)
        self._updates = updates
        self._names = tuple(path.name for path in config.paths)
        self._config, self._sequencer, self._control = config, sequencer, control
        self._model, self._weights, self._contexts = model, weights, contexts
        self._chunk_tokens, self._clock = chunk_tokens, clock

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
        waited_before, parked_s = self._sequencer.waited_s, 0.0
        preempted_before = self.part.num_preemptions
        recomputed_before = self.part.num_recomputed
        proposal = self.part.propose(self.rank, self._sequencer.hashes)
        if self._updates is not None and (ready := self._updates.ready()):
            proposal = replace(proposal, update=ready)
        agreement = await agree(
            self._control,
            self.state,
            proposal,
            self._config,
            self._sequencer.keys,
            finishing=self._sequencer.finish,
        )
        plan = agreement.plan
        self.part.commit(plan)
        if plan.stop:
            return False
        described = await self.part.describe(plan, self._sequencer.finish)
        started = {
            name: self._forward(name, description, plan.decoding)
            for name, description in described.items()
        }
        outputs = await self._sequencer.walk(plan, started)
        for name, output in outputs.items():
            with self._sequencer.around(name):  # outputs may still be computed on its stream
                self.part.complete(name, output, plan.version)
        if plan.update and self._updates is not None:
            self._install(self._updates, plan)
        self.state = plan.after
        if plan.park_ms:
            parked_at = self._clock()
            await perform(Park(ms=plan.park_ms))
            parked_s = self._clock() - parked_at
        self.journal.steps.append(
            StepRecord(
                step=plan.step,
                version=plan.version,
                began_at=began_at,
                ended_at=self._clock(),
                decoding=plan.decoding,
                started=plan.start,
                finished=plan.finish,
                rows=tuple((name, rows.num_rows) for name, rows in described.items()),
                num_tickets=tuple((name, plan.count(name)) for name in self._names),
                control_bytes=agreement.num_bytes,
                waited_s=parked_s + self._sequencer.waited_s - waited_before,
                parked_ms=plan.park_ms,
                sampled=self.part.sampled,
                preempted=self.part.num_preemptions - preempted_before,
                recomputed=self.part.num_recomputed - recomputed_before,
                kv_bytes=sum(
                    shipment.num_rows * self._contexts[name].kv.block_bytes
                    for name, shipment in described.items()
                    if isinstance(shipment, Shipment)
                ),
            )
        )
        return True

    def _install(self, updates: Updates, plan: StepPlan) -> None:
        """Nothing is in flight: the step has ended all there was."""
        began_at, version = self._clock(), plan.update
        self._weights = updates.install(version)
        changed = self.part.updated(version, updates.mode_of(version))
        stall_s = self._clock() - began_at
        updates.installed(version, step=plan.step, stall_s=stall_s, changed=changed)

    def _forward(self, name: str, description: Description | Shipment, decoding: int) -> Forward:
        """The path's forward pass; it runs as the plan's tickets come."""
        context = self._contexts[name]
        if isinstance(description, Shipment):
            return transfer(context, description)
        bound = max_rows(
            self._sequencer.paths[name].work, decoding=decoding, chunk_tokens=self._chunk_tokens
        )
        return self._model.forward(self._weights, context, description, max_rows=bound)
