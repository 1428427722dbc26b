"""Every group is used once before the first step, so that none begins to exist inside one.

A transport may connect a group, or make its communicator, only when it is first used. If that
falls into a path that some ranks take and others do not, it hangs. And a rank that made its groups
in another order than its peers would be found out only by a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .collectives import Gather, finish
from .communicator import Communicator
from .errors import DivergedError

NAME_BYTES = 256


async def warm(
    rank: int,
    communicators: Mapping[tuple[str, str], Communicator],
    members: Mapping[tuple[str, str], Sequence[int]],
    *,
    pack: Callable[[bytes], Any],
    unpack: Callable[[Any], bytes],
) -> None:
    """A gather on each communicator, in one order on all ranks: who its members believe they are.

    `pack` makes a payload of 256 bytes for these transports. Raises DivergedError, naming ranks
    and groups, where two mean different groups by one communicator.
    """
    for key in sorted(communicators):
        path, role = key
        own = f"{path}/{role} of ranks {list(members[key])}"
        payload = pack(own.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"))
        handle = communicators[key].post(Gather(role=role, stage="warm", payload=payload), None)
        answers = await finish(communicators[key], handle, f"rank {rank}: first use of {own}")
        told = [unpack(answer).rstrip(b"\0").decode(errors="replace") for answer in answers]
        if set(told) != {own}:
            listed = "; ".join(f"member {nth} means {name}" for nth, name in enumerate(told))
            raise DivergedError(f"rank {rank}: first use of {own}: {listed}")
