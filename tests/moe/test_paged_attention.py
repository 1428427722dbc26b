"""Attention over pages: against the obvious one, and its bits against themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.driving import describe

from interlace.moe import kernels
from interlace.moe.attention import block_attention, reference_attention
from interlace.moe.batch import Batch
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache
from interlace.moe.paged_attention import paged_attention, turn_heads
from interlace.moe.pages import PAGE_POSITIONS, Pages
from interlace.moe.rotary import rotate

pytestmark = pytest.mark.skipif(not kernels.instructions(), reason="no kernels run here")

SHAPES = [(2, 4, 64), (1, 1, 32), (3, 3, 64), (2, 8, 128), (4, 2, 96), (1, 60, 32), (2, 2, 16)]
"""Key/value heads, query heads for each of them, width."""
LIMITS = {
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float32: {"atol": 2e-6, "rtol": 2e-6},
}
"""How far attention of normal numbers is off."""


class Pool:
    """Keys, values and queries of several sequences in scattered blocks of one cache."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.groups, self.members, self.width = shape
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        planes = dict.fromkeys(("key", "value"), (self.groups, self.width))
        self.cache = KVCache(num_layers=2, num_blocks=num_blocks, planes=planes, dtype=dtype)
        pages = self.cache.pages
        assert pages is not None
        self.pages: Pages = pages
        plane = (2, num_blocks, self.groups, BLOCK_SIZE, self.width)
        filled = {
            name: torch.randn(plane, generator=generator).to(dtype) for name in ("key", "value")
        }
        pages.pool.copy_(pages.filled(filled))
        self.scale = self.width**-0.5
        heads = self.groups * self.members
        self.queries = [
            torch.randn(length, heads, self.width, generator=generator).to(dtype)
            for length in lengths
        ]

    def attend(self, *rows: tuple[int, int, int]) -> list[torch.Tensor]:
        """Rows [start, end) of (sequence, start, end) in one batch; each sequence's output."""
        q, batch = self._batch(rows)
        out = paged_attention(q, self.pages, 1, batch, scale=self.scale)
        return list(out.split([b - a for _, a, b in rows]))

    def attend_in_torch(self, *rows: tuple[int, int, int]) -> list[torch.Tensor]:
        q, batch = self._batch(rows)
        key, value = self.cache.plane(1, "key"), self.cache.plane(1, "value")
        out = block_attention(q, (key,), value, batch, scale=self.scale)
        return list(out.split([b - a for _, a, b in rows]))

    def exact(self, number: int, start: int, end: int) -> torch.Tensor:
        key, value = (
            self.cache.plane(1, name)[self.tables[number]].transpose(1, 2).flatten(0, 1)
            for name in ("key", "value")
        )
        position_T = torch.arange(start, end)
        q = self.queries[number][start:end]
        return reference_attention(q, key, value, position_T, scale=self.scale)

    def _batch(self, rows: tuple[tuple[int, int, int], ...]) -> tuple[torch.Tensor, Batch]:
        batch = Batch.build(describe(*[([0] * (b - a), a, self.tables[s]) for s, a, b in rows]))
        return torch.cat([self.queries[s][a:b] for s, a, b in rows]), batch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().mean())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_as_accurately_as_in_torch(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    pool = Pool([130, 1, 64, 65, 330], shape, dtype)
    rows = ((0, 0, 130), (1, 0, 1), (2, 60, 64), (3, 64, 65), (4, 300, 330))
    found, in_torch = pool.attend(*rows), pool.attend_in_torch(*rows)
    exact = [pool.exact(*row) for row in rows]
    whole = torch.cat(exact)
    reached = error(torch.cat(found), whole)
    margin = 1.0 if dtype == torch.bfloat16 else 1.05
    assert reached <= margin * error(torch.cat(in_torch), whole)
    if dtype == torch.bfloat16:
        assert reached <= 1.45 * error(whole.to(dtype), whole)  # what rounding the result costs
    for output, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(output.double(), expected, **LIMITS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_chunks_or_neighbours(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    length = 330
    pool = Pool([length, 90, 700], shape, dtype)
    (expected,) = pool.attend((0, 0, length))
    for size in (1, 2, 3, 7, 16, 33, 64, 128, 300):
        for start in {s for s in (0, 1, 20, 63, 64, length - size) if 0 <= s <= length - size}:
            rows = (0, start, start + size)
            (alone,) = pool.attend(rows)
            first, beside, _ = pool.attend((1, 80, 90), rows, (2, 640, 641))
            assert torch.equal(alone, expected[start : start + size]), (start, size)
            assert torch.equal(beside, expected[start : start + size]), (start, size)
            assert torch.equal(first, pool.attend((1, 80, 90))[0])


def test_a_batch_of_decoding_sequences_gives_each_its_own_bits(dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65, 128, 200, 331]
    pool = Pool(lengths, (2, 4, 64), dtype)
    rows = [(number, length - 1, length) for number, length in enumerate(lengths)]
    for row, output in zip(rows, pool.attend(*rows), strict=True):
        whole = pool.attend((row[0], 0, row[2]))[0]
        assert torch.equal(output, whole[-1:])


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=4),
    dtype=st.sampled_from(kernels.DTYPES),
)
def test_any_batch_gives_each_sequence_its_own_bits(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    pool = Pool([a + n for a, n in rows], (1, 3, 32), dtype)
    parts = [(number, a, a + n) for number, (a, n) in enumerate(rows)]
    for part, output in zip(parts, pool.attend(*parts), strict=True):
        assert torch.equal(output, pool.attend(part)[0])


def test_what_lies_after_a_row_never_counts(dtype: torch.dtype) -> None:
    pool = Pool([100], (2, 2, 32), dtype)
    (before,) = pool.attend((0, 10, 70))
    later = torch.arange(70, 128)
    slots = pool.tables[0][1] * BLOCK_SIZE + (later - 64)
    rows = torch.full((len(later), 2, 32), 1e9).to(dtype)
    pool.cache.write(1, slots, key=rows, value=-rows)
    assert torch.equal(pool.attend((0, 10, 70))[0], before)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_large_scores_do_not_overflow(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = Pool([150], shape, dtype)
    pool.queries[0] *= 300
    (found,) = pool.attend((0, 0, 150))
    (in_torch,), exact = pool.attend_in_torch((0, 0, 150)), pool.exact(0, 0, 150)
    if dtype == torch.float32:
        assert error(found, exact) <= 1.5 * error(in_torch, exact)
    limits = (
        {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 2e-3, "rtol": 2e-3}
    )
    torch.testing.assert_close(found.double(), exact, **limits)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_turned_as_in_torch_and_keys_and_values_find_their_place(
    shape: tuple[int, int, int], normed: bool, dtype: torch.dtype
) -> None:
    pool = Pool([150], shape, dtype)
    groups, members, width = shape
    heads, eps = groups * members, 1e-6
    batch = Batch.build(describe(([0] * 80, 50, pool.tables[0])))
    qkv = torch.randn(80, (heads + 2 * groups) * width).to(dtype)
    weight = torch.randn(heads + groups, width).to(dtype) if normed else None
    angle = torch.rand(80, 1, width)
    rotation = (angle.cos(), angle.sin())
    before = pool.cache.plane(1, "key")
    other = pool.cache.plane(0, "value")
    queries = turn_heads(qkv, rotation, pool.pages, 1, batch, norm_AE=weight, eps=eps)
    rows = qkv.unflatten(1, (-1, width))
    turned = rows[:, :-groups].float()
    if weight is not None:
        turned = torch.nn.functional.rms_norm(turned, (width,), None, eps) * weight
    turned = rotate(turned, *rotation)
    slots = batch.slot_mapping
    key, value = pool.cache.plane(1, "key"), pool.cache.plane(1, "value")
    found = key[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    limits = {"rtol": 2**-7 if dtype == torch.bfloat16 else 2**-19, "atol": 1e-5}
    torch.testing.assert_close(queries.float(), turned[:, :heads], **limits)
    torch.testing.assert_close(found.float(), turned[:, heads:], **limits)
    assert torch.equal(value[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE], rows[:, -groups:])
    written = torch.zeros(before.shape[0], BLOCK_SIZE, dtype=torch.bool)
    written[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = True
    kept = ~written[:, None, :, None].expand_as(before)
    assert torch.equal(key[kept], before[kept])
    assert torch.equal(pool.cache.plane(0, "value"), other)


def test_a_block_that_is_not_there_is_refused(dtype: torch.dtype) -> None:
    pages = Pool([64], (1, 1, 32), dtype).pages
    pages.check(torch.tensor([[0, 3]]))
    pages.check(torch.empty((0, 0), dtype=torch.int64))
    for block in (4, -1):
        with pytest.raises(ValueError, match=f"names block {block}, the cache has 4"):
            pages.check(torch.tensor([[0, block]]))


def test_a_page_holds_a_block(dtype: torch.dtype) -> None:
    assert PAGE_POSITIONS == BLOCK_SIZE
    pool = Pool([64], (1, 1, 32), dtype)
    places = torch.cat([pool.pages.places[name].flatten() for name in ("key", "value")])
    assert torch.equal(places.sort().values, torch.arange(2 * BLOCK_SIZE * 32))


def test_what_leaves_and_enters_a_cache_with_pages_is_what_leaves_one_without(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = {"key": (2, 32), "value": (2, 32)}

    def cache() -> KVCache:
        return KVCache(num_layers=3, num_blocks=5, planes=planes, dtype=dtype)

    paged = cache()
    monkeypatch.setattr(kernels, "native", None)
    plain = cache()
    assert paged.pages is not None
    assert plain.pages is None
    assert paged.block_bytes == plain.block_bytes
    rows = {name: torch.randn(40, 2, 32).to(dtype) for name in planes}
    slots = torch.randperm(5 * BLOCK_SIZE)[:40]
    for layer in range(3):
        for each in (paged, plain):
            each.write(layer, slots, **rows)
    paged.copy_blocks(((0, 3), (3, 1)))
    plain.copy_blocks(((0, 3), (3, 1)))
    moved = paged.read_blocks([4, 0, 2])
    assert torch.equal(moved, plain.read_blocks([4, 0, 2]))
    paged.write_blocks([1, 3, 0], moved)
    plain.write_blocks([1, 3, 0], moved)
    for name in planes:
        for layer in range(3):
            assert torch.equal(paged.plane(layer, name), plain.plane(layer, name))
