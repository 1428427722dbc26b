"""How ranks find out whether they share memory, and what they make of it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.comm.windows_in_memory import EXTENSION

from interlace.comm import windows as module
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.window_layout import GATHER
from interlace.comm.windows import Tell, Unshared, Windows, meet


class Ranks:
    """Threads that tell one another texts, as processes do over a boot group."""

    def __init__(self, size: int, forge: Callable[[int, str], str] = lambda _, text: text) -> None:
        self.size, self.forge = size, forge
        self.texts = [""] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def tell(self, rank: int) -> Tell:
        def tell(text: str) -> list[str]:
            self.texts[rank] = self.forge(rank, text)
            self.barrier.wait()
            told = list(self.texts)
            self.barrier.wait()
            return told

        return tell

    def run(self, what: Callable[[int, Tell], Any]) -> list[Any]:
        """What each rank returned or raised."""
        outcomes: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                outcomes[rank] = what(rank, self.tell(rank))
            except Unshared as error:
                outcomes[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


def test_ranks_that_share_memory_make_windows_on_either_kind_and_leave_nothing_mapped() -> None:
    def gather(rank: int, tell: Tell) -> bytes:
        extension = None if rank == 1 else EXTENSION
        windows = Windows(rank, tell, meet(rank, tell, extension=True), extension)
        groups = [(0, 2), (1,)]
        mine = groups[rank % 2]
        window = windows.make("p", "r", groups, slots=2, capacity=100)
        windows.waiter.begin()
        windows.waiter.arm()
        message = (0, 0, 0, 0, 7, GATHER)
        window.post(*message, bytes([rank]), (1,) * len(mine))
        while window.poll(0, 0) != 0:
            windows.waiter.wait(0.05)
            windows.waiter.arm()
        out = bytearray(len(mine))
        assert window.take(*message, (1,) * len(mine), out) is None
        tell("all have taken theirs")
        windows.close()
        with pytest.raises(ValueError, match=r"closed|released"):
            window.poll(0, 0)
        return bytes(out)

    assert Ranks(3).run(gather) == [b"\0\2", b"\1", b"\0\2"]


def test_one_rank_without_the_extension_is_one_error_on_all() -> None:
    found = Ranks(3).run(lambda rank, tell: meet(rank, tell, extension=rank != 1))
    assert found == ["the extension is not built on rank 1"] * 3


def test_memory_that_is_not_the_one_its_owner_wrote_to_is_another_host() -> None:
    """The same process id exists on two hosts, and so may a descriptor of it."""
    stranger = SharedMemory.create(4096)

    def forge(rank: int, text: str) -> str:
        mark, space, _ = text.partition(" ")
        return f"{mark} {stranger.name}" if rank == 1 and space else text

    found = Ranks(2, forge).run(lambda rank, tell: meet(rank, tell, extension=True))
    assert found == ["rank 0 finds other memory where rank 1's should be"] * 2
    stranger.close()


def test_memory_that_cannot_be_opened_is_one_error_on_all() -> None:
    def forge(rank: int, text: str) -> str:
        return text[:32] + " 999999999 3" if rank == 0 and len(text) > 32 else text

    found = Ranks(2, forge).run(lambda rank, tell: meet(rank, tell, extension=True))
    assert found[0] == found[1]
    assert found[0].startswith("rank 1 cannot open memory of rank 0 (No such file")


def test_a_system_that_shares_no_memory_is_one_error_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(size: int) -> SharedMemory:
        raise OSError("not here")

    monkeypatch.setattr(module.SharedMemory, "create", refused)
    found = Ranks(2).run(lambda rank, tell: meet(rank, tell, extension=True))
    assert found == ["rank 0 has no memory to share (not here)"] * 2
