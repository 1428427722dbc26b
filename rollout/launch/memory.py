"""How many KV blocks a rank's memory holds beside its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from interlace.comm.collectives import Finish, Gather, perform

from .transport import Transport

KEPT_FREE = 0.1
"""Share of the free memory that is left alone, for activations and everybody else."""


def affordable_blocks(
    wanted: int, *, block_bytes: int, folder: Path, sharers: int, device: torch.device
) -> int:
    """`wanted`, or fewer where memory is short; ValueError if not even one fits.

    `sharers` ranks share this memory and each may hold all of the checkpoint in `folder`.
    """
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = _free_bytes(device)
    room = free * (1 - KEPT_FREE) / sharers - weights
    blocks = min(wanted, int(room // block_bytes))
    if blocks < 1:
        raise ValueError(
            f"no memory for the KV cache: {free / 2**30:.1f} GiB are free, {sharers} ranks share "
            f"them, the weights take up to {weights / 2**30:.1f} GiB each and one block of 64 "
            f"tokens {block_bytes / 2**20:.1f} MiB: use fewer ranks, a smaller model or a larger "
            "machine"
        )
    return blocks


async def agreed_minimum(transport: Transport, number: int, timeout_s: float) -> int:
    """The smallest `number` any rank brought; every rank learns it."""
    control = transport.control(timeout_s)
    payload = number.to_bytes(8, "little")
    handle = control.post(Gather(role="control", stage="blocks", payload=payload), None)
    where = f"rank {transport.rank}: every rank says how many KV blocks it can hold"
    answers = await perform(Finish(communicator=control, handle=handle, where=where))
    return min(int.from_bytes(answer, "little") for answer in answers)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")
