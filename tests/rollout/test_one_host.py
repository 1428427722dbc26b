"""Memory that ranks share, or that none of them does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from interlace.comm.shared_memory import SharedMemory
from interlace.rollout.launch.one_host import share


def shared_by(world: int) -> list[SharedMemory | None]:
    store, found = HashStore(), dict[int, Any]()

    def rank(number: int) -> None:
        found[number] = share(store, key="board", rank=number, world=world, num_bytes=100)

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return [found[number] for number in range(world)]


def test_what_one_rank_writes_the_others_read() -> None:
    memories = shared_by(3)
    assert memories[0] is not None
    memories[0].buffer[:5] = b"hello"
    for memory in memories:
        assert memory is not None
        assert bytes(memory.buffer[:6]) == b"hello\0"
        memory.close()


def test_nobody_has_it_if_one_cannot_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, size: int) -> SharedMemory:
        raise OSError("another host")

    monkeypatch.setattr(SharedMemory, "open", refuse)
    assert shared_by(2) == [None, None]


def test_memory_of_the_same_name_elsewhere_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def another(name: str, size: int) -> SharedMemory:
        return SharedMemory.create(size)

    monkeypatch.setattr(SharedMemory, "open", another)
    assert shared_by(2) == [None, None]
