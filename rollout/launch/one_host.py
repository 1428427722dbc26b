"""Whether all ranks are on one host, settled by trying: can each of them open the same memory?"""

from __future__ import annotations

import contextlib
import secrets

from torch.distributed.distributed_c10d import Store

from interlace.comm.shared_memory import SharedMemory

_PROOF_BYTES = 16


def share(store: Store, *, key: str, rank: int, world: int, num_bytes: int) -> SharedMemory | None:
    """Zeroed memory that every rank has mapped; None on every rank if one of them cannot.

    All ranks call it with the same `key`, `world` and `num_bytes`. Waits for them as long as the
    store's timeout allows, and raises what the store raises.
    """
    # Another process namespace may hold something else under the same name: a number proves it.
    size = num_bytes + _PROOF_BYTES
    memory = _create(store, key, size) if rank == 0 else _open(store, key, size)
    store.set(f"{key}/rank {rank}", "no" if memory is None else "yes")
    answers = [store.get(f"{key}/rank {other}") for other in range(world)]
    if all(answer == b"yes" for answer in answers):
        return memory
    if memory is not None:
        memory.close()
    return None


def _create(store: Store, key: str, size: int) -> SharedMemory | None:
    memory, name, proof = None, "", secrets.token_bytes(_PROOF_BYTES)
    with contextlib.suppress(OSError):
        memory = SharedMemory.create(size)
        memory.buffer[-_PROOF_BYTES:] = proof
        name = memory.name
    store.set(key, f"{name}/{proof.hex()}")
    return memory


def _open(store: Store, key: str, size: int) -> SharedMemory | None:
    name, proof = store.get(key).decode().split("/")
    with contextlib.suppress(OSError):
        memory = SharedMemory.open(name, size) if name else None
        if memory is not None and memory.buffer[-_PROOF_BYTES:] == bytes.fromhex(proof):
            return memory
        if memory is not None:
            memory.close()
    return None
