"""The arms of ``[unsafe]`` above the collectives: in the forward pass and in the commit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from interlace.comm.collectives import Forward, Gather, PreemptionPoint, perform
from interlace.comm.unsafe import Arm
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.program import stub_result
from interlace.moe.weights import Weights

from .group import Leader, Output


def unsafe_program(arms: Collection[Arm]) -> type[Model]:
    """The class whose program the plan follows: Model itself, but for arm slot_per_path."""
    return OneMoreGather if "slot_per_path" in arms else Model


def unsafe_model(arms: Collection[Arm]) -> type[Model]:
    """The class that computes: that of the program, or one that leaves early without rows."""
    program = unsafe_program(arms)
    if "idle_skips" in arms:
        return type("UnsafeModel", (StaysAway, program), {})
    return type("UnsafeModel", (ReturnsEarly, program), {}) if "early_return" in arms else program


def unsafe_leader(arms: Collection[Arm]) -> type[Leader]:
    """The class that leads a group: Leader itself, or one that commits too soon."""
    return CommitsEarly if "early_commit" in arms else Leader


class OneMoreGather(Model):
    """Belongs to arm slot_per_path: every layer with experts has one more collective of role tp.

    As built, two of role tp lie between any two of role ep of different layers, and counted per
    path role ep still alternates between two slots: by luck. One more, of four bytes, ends it.
    """

    async def forward(
        self,
        weights: Weights,
        context: PathContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ForwardOutput:
        forward = super().forward(weights, context, description, max_rows=max_rows)
        answer, role = None, "ep"
        while True:
            try:
                request = forward.send(answer)
            except StopIteration as stop:
                output: ForwardOutput = stop.value
                return output
            if isinstance(request, PreemptionPoint):
                answer = await perform(request)
                continue
            if (role, request.role) == ("tp", "ep"):
                nothing = torch.zeros(1, device=weights.device)
                stage = f"{request.stage}.one_more"
                await perform(Gather(role="tp", stage=stage, payload=nothing))
            role = request.role
            answer = await perform(request)


class StaysAway(Model):
    """Arm idle_skips: a rank without rows takes no part in the forward pass of the others."""

    async def forward(
        self,
        weights: Weights,
        context: PathContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ForwardOutput:
        forward = super().forward(weights, context, description, max_rows=max_rows)
        return await forward if description.num_rows else _alone(forward, context, None)


class ReturnsEarly(Model):
    """Arm early_return: without rows of its own a rank leaves after the first collective.

    It looks right: its output is empty either way.
    """

    async def forward(
        self,
        weights: Weights,
        context: PathContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ForwardOutput:
        forward = super().forward(weights, context, description, max_rows=max_rows)
        if description.num_rows:
            return await forward
        first = await perform(forward.send(None))
        return _alone(forward, context, first)


class CommitsEarly(Leader):
    """Arm early_commit: a step's results leave this rank before the exchange has agreed on it."""

    def complete(self, path: str, output: Output, version: int) -> None:
        super().complete(path, output, version)
        self.tell_results()


def _alone(forward: Forward, context: PathContext, answer: Any) -> ForwardOutput:
    """The output of a forward pass that hears nothing more of the others."""
    sizes = {"ep": context.ep_size, "tp": context.tp_size}
    while True:
        try:
            request = forward.send(answer)
        except StopIteration as stop:
            output: ForwardOutput = stop.value
            return output
        answer = stub_result(request, sizes[request.role])
