"""The small model with another expert strategy in decode than in prefill."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from interlace.comm.collectives import Gather, perform
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput
from interlace.rollout.verify.hazards.small_model import (
    NUM_EXPERTS,
    NUM_LAYERS,
    SmallModel,
    mix,
)


class TwoStrategies(SmallModel):
    """Prefill sends counts, then rows; decode gathers all rows, padded to an agreed number."""

    async def forward(
        self, weights: Any, context: Any, description: Description, *, max_rows: int = 0
    ) -> ForwardOutput:
        if context != "decode":
            return await super().forward(weights, context, description, max_rows=max_rows)
        values = self._attend(description)
        experts = []
        for layer in range(NUM_LAYERS):
            if self.tp > 1:
                view = mix(self.rank % self.tp, layer, values)
                views = await perform(Gather(role="tp", stage=f"{layer}.views", payload=view))
                values = mix(*views)
            expert_T = values % NUM_EXPERTS
            experts.append(expert_T)
            own_T = expert_T % self.world
            order_T = torch.argsort(own_T, stable=True)
            mine = torch.bincount(own_T, minlength=self.world)
            counted = torch.cat([values.new_tensor([len(values)]), values])
            padded = F.pad(counted, (0, max_rows - len(values)))
            seen = await perform(Gather(role="ep", stage=f"{layer}.dispatch", payload=padded))
            rows = [part[1 : 1 + int(part[0])] for part in seen]
            answered = [part[part % NUM_EXPERTS % self.world == self.rank] for part in rows]
            answers = torch.cat(answered)
            back = await self._exchange(
                f"{layer}.combine",
                mix(answers % NUM_EXPERTS, layer, answers),
                tuple(len(part) for part in answered),
                tuple(mine.tolist()),
            )
            values = values.clone()
            values[order_T] = back
        return self._output(values, experts, description)
