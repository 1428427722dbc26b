"""Memory in huge pages."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from interlace.moe.arena import HUGE_PAGE, LINE, Arena
from interlace.moe.kv_cache import KVCache

PAGE = 4096


def test_pieces_are_zero_apart_and_on_lines() -> None:
    arena = Arena(3 * HUGE_PAGE)
    sizes = [100, HUGE_PAGE, 1, 2 * HUGE_PAGE, 5 * HUGE_PAGE, 64]
    pieces = [arena.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert len(piece) == sizes[number]
        assert piece.data_ptr() % LINE == 0
        assert not piece.any()
        piece.fill_(number + 1)
    for number, piece in enumerate(pieces):
        assert (piece == number + 1).all()


def test_pieces_of_a_chunk_follow_one_another_and_a_chunk_begins_at_a_huge_page() -> None:
    arena = Arena(2 * HUGE_PAGE)
    first, second = arena.take(65), arena.take(10)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 2 * LINE


def test_a_piece_outlives_its_arena() -> None:
    piece = Arena().take(HUGE_PAGE)
    piece.fill_(7)
    assert bool((piece == 7).all())


@pytest.mark.skipif(sys.platform != "linux", reason="asks what memory is there as Linux does")
@pytest.mark.parametrize("kind", ["arena", "pages", "planes"])
def test_all_of_it_is_there_before_a_step_writes_to_it(kind: str) -> None:
    size = 32 * HUGE_PAGE
    if kind == "arena":
        memory = Arena().take(size)
    else:
        blocks = size // (2 * 64 * 64 * 2)  # one layer's keys and values, of one head
        planes = {"key": (1, 64), ("value" if kind == "pages" else "other"): (1, 64)}
        cache = KVCache(num_layers=1, num_blocks=blocks, planes=planes, dtype=torch.bfloat16)
        memory = next(iter(cache._pools.values()))
    assert share_that_is_there(memory) == 1


def share_that_is_there(memory: torch.Tensor) -> float:
    first = -(-memory.data_ptr() // PAGE) * PAGE
    num_pages = (memory.data_ptr() + memory.nbytes - first) // PAGE
    found = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    given = ctypes.c_void_p(first), ctypes.c_size_t(num_pages * PAGE), found
    assert libc.mincore(*given) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found) / num_pages
