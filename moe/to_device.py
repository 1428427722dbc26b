"""Numbers between the host, which has made them, and where a forward pass needs them; and back.

A forward pass takes in numbers of the host by `to_device` and in no other way; what it has computed
leaves by `to_host`, once, after its end.
"""

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
    if device.type == "cpu":
        return tensor
    if not values.size:
        return torch.empty(values.shape, dtype=tensor.dtype, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same tensors in the host's memory; from an accelerator with one wait for all of them.

    They are copied in the order of the current stream, and an event behind the copies is waited
    for, so work that was put on the stream afterwards, or on another, is not.
    """
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    copies = tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for tensor in tensors
    )
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return copies
