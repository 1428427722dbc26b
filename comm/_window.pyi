"""What `window.cpp` is to Python; explained in its twin, `window_reference`, and in `doorbell`."""

from collections.abc import Sequence
from typing import Any

class Window:
    def __new__(
        cls,
        memories: Sequence[Any],
        me: int,
        slots: int,
        capacity: int,
        path: int,
        role: int,
        bells: Sequence[Any] = ...,
        /,
    ) -> Window: ...
    def post(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        payload: Any,
        counts: Sequence[int],
        visible_at: int = 0,
        /,
    ) -> None: ...
    def postpone(self, slot: int, comm_seq: int, visible_at: int, /) -> None: ...
    def poll(self, slot: int, comm_seq: int, /) -> int: ...
    def take(
        self,
        slot: int,
        comm_seq: int,
        epoch: int,
        seq: int,
        stage: int,
        kind: int,
        counts: Sequence[int],
        out: Any,
        /,
    ) -> tuple[int, int, bytes] | None: ...
    def watch(self, slot: int, comm_seq: int, /) -> object: ...
    def close(self) -> None: ...

class Crossing:
    def __new__(cls, window: Window, messages: bytes, spin_ns: int, /) -> Crossing: ...
    def address(self) -> int: ...
    def at(self) -> int: ...
    def poll(self) -> bool: ...
    def moments(self) -> list[tuple[float, float, float, float, float]]: ...
    def fault(self) -> tuple[int, int, int, bytes] | None: ...

class Doorbell:
    def __new__(cls, memory: Any, /) -> Doorbell: ...
    def heard(self) -> int: ...
    def wait(self, heard: int, until_ns: int, spin_ns: int, /) -> None: ...
    def ring(self) -> None: ...
    def close(self) -> None: ...

def wake_on_time() -> None:
    """The calling thread's sleeps end in time, and not up to 50 microseconds later."""

def layout() -> dict[str, int]:
    """The constants of `window_layout`, as the C++ has them."""

def sizes(members: int, capacity: int) -> tuple[int, int]:
    """`header_bytes` and `slot_bytes`."""
