"""Models that decide locally, put on one rank under the shipped sequencer to see them refused."""

from __future__ import annotations

from typing import Any

from interlace.comm.collectives import Collective, perform
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput

from .small_model import SmallModel


class FaultyModel(SmallModel):
    """May replace any of its collectives, or return where one should be."""

    def fault(self, nth: int, request: Collective, description: Description) -> Collective | None:
        """What to ask for instead of the forward pass's nth request; None: return at once."""
        return request

    def replaced(self, path: str, request: Collective) -> Collective:
        """The same request in another form."""
        return request

    async def forward(
        self, weights: Any, context: Any, description: Description, *, max_rows: int = 0
    ) -> ForwardOutput:
        inner = super().forward(weights, context, description, max_rows=max_rows)
        value, nth = None, 0
        while True:
            try:
                request = inner.send(value)
            except StopIteration as stop:
                output: ForwardOutput = stop.value
                return output
            asked = self.fault(nth, request, description)
            if asked is None:
                inner.close()
                return self.nothing(description)
            value = await perform(self.replaced(context, asked))
            nth += 1


class ReturnsEarly(FaultyModel):
    """Returns before its first collective where it has no rows."""

    def fault(self, nth: int, request: Collective, description: Description) -> Collective | None:
        return request if description.num_rows else None
