from __future__ import annotations

from collections.abc import Sequence

import pytest

from interlace.comm.announcement import HEAD_BYTES, announce
from interlace.comm.testing import LocalWorld


def world(size: int) -> LocalWorld:
    def split(payload: bytes, counts: Sequence[int]) -> Sequence[bytes]:
        raise AssertionError("announcements only gather")

    return LocalWorld(size, split=split, concat=b"".join, copy=bytes)


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 4, HEAD_BYTES - 3, 3 * HEAD_BYTES])
def test_every_member_hears_what_the_first_says(length: int) -> None:
    said = bytes(range(256)) * (length // 256 + 1)
    local = world(3)
    ranks = [
        announce(
            local.communicator("control", range(3), rank),
            said[:length] if rank == 0 else None,
            "here",
        )
        for rank in range(3)
    ]
    assert local.run(ranks) == [said[:length]] * 3


def test_announcements_of_several_groups_do_not_meet() -> None:
    local = world(4)
    ranks = [
        announce(
            local.communicator("control", (0, 1) if rank < 2 else (2, 3), rank),
            bytes([rank]) if rank % 2 == 0 else None,
            "here",
        )
        for rank in range(4)
    ]
    assert local.run(ranks) == [b"\0", b"\0", b"\2", b"\2"]
