"""Numbers that the host has computed, on their way to where a forward pass needs them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the same numbers; on a CPU it shares their memory.

    For an accelerator they are copied in the order of the current stream, and the host does not
    wait: it would have to let go of its other paths until all work before the copy is done.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu" or not values.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
