"""Both ends of a window, in bytearrays of this process."""

import mmap
from collections.abc import Sequence
from typing import Any

from interlace.comm import window_layout as at
from interlace.comm import window_reference
from interlace.comm.window_channel import WindowChannel
from interlace.comm.windows import native

PATH, ROLE = 11, 22
CAPACITY = 4096
EXTENSION = native()

Memories = list[bytearray]


def kinds(members: int) -> list[tuple[str, ...]]:
    """Groups of the C++, of its twin, and of both in turn."""
    if EXTENSION is None:
        return [("python",) * members]
    mixed = tuple("python" if nth % 2 else "c++" for nth in range(members))
    return [("c++",) * members, ("python",) * members, mixed]


def memories(members: int, slots: int = 2, capacity: int = CAPACITY) -> Memories:
    return [bytearray(at.window_bytes(members, slots, capacity)) for _ in range(members)]


def pages(members: int, slots: int = 2, capacity: int = CAPACITY) -> list[mmap.mmap]:
    """The same that begin on pages, as what ranks share does."""
    return [mmap.mmap(-1, at.window_bytes(members, slots, capacity)) for _ in range(members)]


def crossing(window: Any, messages: bytes) -> Any:
    """Of the C++, which asks to be waited for at once."""
    assert EXTENSION is not None
    return EXTENSION.Crossing(window, messages, 0)


def end(
    kind: str,
    shared: Sequence[Any],
    me: int,
    *,
    slots: int = 2,
    capacity: int = CAPACITY,
    path: int = PATH,
    role: int = ROLE,
    bells: Sequence[Any] = (),
) -> Any:
    made = EXTENSION.Window if kind == "c++" else window_reference.Window
    return made(shared, me, slots, capacity, path, role, bells)


def ends(which: Sequence[str], shared: Sequence[Any], **how: Any) -> list[Any]:
    return [end(kind, shared, me, **how) for me, kind in enumerate(which)]


class NoWaiter:
    """Nothing here is worth waiting for."""

    def __init__(self) -> None:
        self.due_at: list[int] = []

    def begin(self) -> None: ...

    def arm(self) -> None: ...

    def due(self, at_ns: int) -> None:
        self.due_at.append(at_ns)

    def wait(self, seconds: float) -> None: ...


def channel(window: Any, rank: int, members: Sequence[int], **how: Any) -> WindowChannel:
    facts: dict[str, Any] = {
        "path": "decode",
        "role": "ep",
        "slots": 2,
        "capacity": CAPACITY,
        "timeout_s": 5.0,
        "waiter": NoWaiter(),
        "clock": lambda: 0,
    }
    return WindowChannel(window, rank=rank, members=members, **{**facts, **how})
