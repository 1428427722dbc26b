"""Replaying in a trainer which experts each token went to in the rollout.

Two programs that compute the same router's scores in a different order differ in the last bits.
Where two experts are as good as equal they then choose differently, and one such token is worth a
thousand rounding errors. With the rollout's choice replayed only its weights are computed anew, so
gradients still reach the router.

Shapes: N rows of a forward pass (B times T), E experts, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a router of transformers answers: logits [N, E], weights [N, K], experts [N, K]."""


@contextmanager
def replayed(model: Any, experts_BTLK: torch.Tensor) -> Iterator[None]:
    """Within it, forwards of a transformers Mixtral over B x T tokens choose these experts.

    A row whose experts are unknown (-1) is routed by the model. Gradients flow within the forward
    only: leave the context when it is done, before or after going backward.
    """
    with ExitStack() as hooks:
        for place, layer in enumerate(model.model.layers):
            chosen_NK = experts_BTLK[:, :, place].flatten(0, 1)
            handle = layer.mlp.gate.register_forward_hook(_chooses(chosen_NK))
            hooks.callback(handle.remove)
        yield


def _chooses(chosen_NK: torch.Tensor) -> Any:
    known_N1 = (chosen_NK >= 0).all(-1, keepdim=True)

    def answer(gate: Any, inputs: Any, routed: Routed) -> Routed:
        logits_NE, _, own_NK = routed
        experts_NK = torch.where(known_N1, chosen_NK, own_NK)
        weight_NK = logits_NE.float().softmax(-1).gather(-1, experts_NK)
        return logits_NE, weight_NK / weight_NK.sum(-1, keepdim=True), experts_NK

    return answer
