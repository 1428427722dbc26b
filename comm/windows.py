"""One rank's windows on its host: their memory, and how the members find one another's."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from . import window_reference
from .crossing import Crosses
from .doorbell import Doorbell, DoorbellWaiter, ReferenceDoorbell
from .shared_memory import SharedMemory
from .window_channel import WindowEnd
from .window_layout import DOORBELL_BYTES, window_bytes

Tell = Callable[[str], list[str]]
"""A collective of all ranks: everybody's text, in rank order."""

SPIN_NS = 50_000
"""How long a wait looks for a message before it sleeps: what falling asleep and waking up cost."""
CROSSING_SPIN_NS = 200_000
"""The same inside a crossing, which has to come back to Python to sleep: as long as one rank has
more rows in a layer than another. Others that want the core get it meanwhile."""


class Unshared(Exception):
    """Ranks cannot share memory; the message says why, the same on every rank."""


class Met(NamedTuple):
    """All ranks' doorbells, opened."""

    own: SharedMemory
    others: dict[int, SharedMemory]


def native() -> ModuleType | None:
    """The C++ extension; None where it was not built."""
    try:
        from . import _window  # built where there is a compiler
    except ImportError:
        return None
    return _window


def meet(rank: int, tell: Tell, *, extension: bool) -> Met:
    """Every rank opens every other's doorbell; a collective of all ranks.

    A host is not asked for its name: the memory is opened, and what its owner wrote is found in it
    or not. Raises Unshared on every rank if one rank fails or has no extension to use it with.
    """
    nonce = secrets.token_bytes(16)
    opened: dict[int, SharedMemory] = {}
    own, failed = None, "" if extension else f"the extension is not built on rank {rank}"
    try:
        own = SharedMemory.create(DOORBELL_BYTES + len(nonce))
        own.buffer[DOORBELL_BYTES:] = nonce
    except (OSError, AttributeError) as error:  # the latter where the system has no memfd
        failed = failed or f"rank {rank} has no memory to share ({error})"
    said = [text.split(" ", 1) for text in tell(f"{nonce.hex()} {own.name if own else ''}")]
    for peer, (mark, name) in enumerate(said):
        if peer == rank or own is None or not name:
            continue
        try:
            opened[peer] = SharedMemory.open(name, own.size)
        except OSError as error:
            failed = failed or f"rank {rank} cannot open memory of rank {peer} ({error.strerror})"
            continue
        if bytes(opened[peer].buffer[DOORBELL_BYTES:]) != bytes.fromhex(mark):
            failed = failed or f"rank {rank} finds other memory where rank {peer}'s should be"
    failures = [text for text in tell(failed) if text]
    if own is None or failures:
        for memory in (own, *opened.values()):
            if memory is not None:
                memory.close()
        raise Unshared(failures[0])
    return Met(own, opened)


class Windows:
    """Makes windows, one for each (path, role, group), on the C++ or on its Python twin."""

    def __init__(self, rank: int, tell: Tell, met: Met, extension: ModuleType | None) -> None:
        """`met`: from `meet`. Without an `extension` the twin is used: slow, for tests."""
        self._rank, self._tell, self._met, self._extension = rank, tell, met, extension
        self._memories: list[SharedMemory] = [met.own, *met.others.values()]
        self._open: list[Any] = []
        bell = met.own.buffer[:DOORBELL_BYTES]
        ranks, cores = 1 + len(met.others), len(os.sched_getaffinity(0))
        spin_ns = SPIN_NS if ranks <= cores else 0
        self._crossing_spin_ns = CROSSING_SPIN_NS if ranks <= cores else 0
        if extension is None:
            doorbell: Doorbell = ReferenceDoorbell(bell)
            self.waiter = DoorbellWaiter(doorbell, spin_ns=0)
        else:
            doorbell = extension.Doorbell(bell)
            self.waiter = DoorbellWaiter(
                doorbell, spin_ns=spin_ns, wake_on_time=extension.wake_on_time
            )
        self._open.append(doorbell)
        self._views = [bell]

    def make(
        self, path: str, role: str, groups: Sequence[Sequence[int]], *, slots: int, capacity: int
    ) -> WindowEnd:
        """This rank's end of its own group of a partition; a collective of all ranks.

        Slots are sparse: they cost memory as far as messages have reached into them.
        """
        members = next(tuple(group) for group in groups if self._rank in group)
        size = window_bytes(len(members), slots, capacity)
        own = SharedMemory.create(size)
        names = self._tell(own.name)
        memories = [
            own if peer == self._rank else SharedMemory.open(names[peer], size) for peer in members
        ]
        self._memories += memories
        bells = [
            self._met.others[peer].buffer[:DOORBELL_BYTES] for peer in members if peer != self._rank
        ]
        self._views += bells
        kind = window_reference.Window if self._extension is None else self._extension.Window
        window: WindowEnd = kind(
            [memory.buffer for memory in memories],
            members.index(self._rank),
            slots,
            capacity,
            zlib.crc32(path.encode()),
            zlib.crc32(role.encode()),
            bells,
        )
        self._open.append(window)
        return window

    @property
    def crosses(self) -> Crosses | None:
        """Makes crossings over windows made here; None on the twin."""
        if self._extension is None:
            return None
        crossing, spin_ns = self._extension.Crossing, self._crossing_spin_ns
        return lambda window, messages: crossing(window, messages, spin_ns)

    def close(self) -> None:
        """Nothing made here may be used after this. Others' mappings of this memory hold."""
        for opened in self._open:
            opened.close()
        for view in self._views:
            view.release()
        for memory in self._memories:
            memory.close()
        self._open.clear()
        self._views.clear()
        self._memories.clear()
