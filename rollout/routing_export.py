"""Which experts each token went to, in the layouts that trainers read: for routing replay.

Rows are those of the ledger, as sampled: the first `tokens - 1`, as the last token was never
forwarded. Engines number all hidden layers; the ledger has those with experts. Where the two differ
(the first layers of DeepSeek models are dense), `dense_layers` says which rows of zeros to put in.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .trajectory import Trajectory


def sglang_base64(
    trajectory: Trajectory, start: int = 0, *, dense_layers: Sequence[int] = ()
) -> str:
    """What SGLang returns as `meta_info.routed_experts` for `routed_experts_start_len=start`.

    base64 of raw little-endian int32 [tokens - 1 - start, layers * top_k], row-major. ValueError if
    experts of these tokens are missing, or `start` is beyond them.
    """
    rows_TLK = _rows(trajectory, start, dense_layers)
    return base64.b64encode(rows_TLK.astype("<i4").tobytes()).decode("ascii")


def vllm_packed(
    trajectory: Trajectory,
    start: int = 0,
    *,
    dense_layers: Sequence[int] = (),
    dtype: Literal["uint8", "uint16"] = "uint8",
) -> dict[str, Any]:
    """What vLLM's token endpoint gives to prime-rl and SkyRL for `routed_experts_prompt_start`.

    `data` is base64 of row-major little-endian `dtype` of shape `shape`, [tokens - 1 - start,
    layers, top_k]; `start` is the position of the first row. uint8 holds every expert there is
    here; uint16 is for readers that expect it of larger models. ValueError as `sglang_base64`.
    """
    rows_TLK = _rows(trajectory, start, dense_layers)
    wire = {"uint8": "u1", "uint16": "<u2"}
    if dtype not in wire:
        raise ValueError(f"dtype is uint8 or uint16, not {dtype!r}")
    return {
        "data": base64.b64encode(rows_TLK.astype(wire[dtype]).tobytes()).decode("ascii"),
        "shape": list(rows_TLK.shape),
        "start": start,
        "dtype": dtype,
    }


def _rows(trajectory: Trajectory, start: int, dense_layers: Sequence[int]) -> NDArray[np.uint8]:
    """uint8 [tokens - 1 - start, layers, top_k], with zeros for layers without experts."""
    number, stop = trajectory.trajectory_id, max(0, trajectory.num_tokens - 1)
    _, num_layers, top_k = trajectory.experts.shape
    if num_layers == 0:
        raise ValueError(f"trajectory {number} has no experts: its model has no layers with any")
    if trajectory.experts_known < stop:
        raise ValueError(
            f"trajectory {number} has {trajectory.num_tokens} tokens and experts of the first "
            f"{trajectory.experts_known}: it was aborted before the rest was forwarded; resume it"
        )
    if not 0 <= start <= stop:
        raise ValueError(
            f"trajectory {number}: start is {start}, and there are rows for tokens 0 to {stop}"
        )
    num_layers += len(set(dense_layers))
    outside = [layer for layer in dense_layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(f"dense layer {outside[0]} is none of the model's {num_layers} layers")
    with_experts = [layer for layer in range(num_layers) if layer not in dense_layers]
    rows_TLK = np.zeros((stop - start, num_layers, top_k), np.uint8)
    rows_TLK[:, with_experts] = trajectory.experts[start:stop]
    return rows_TLK
