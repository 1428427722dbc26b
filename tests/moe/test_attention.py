"""Block attention against the obvious one, and its bits against themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.driving import describe

from interlace.moe.attention import block_attention, reference_attention
from interlace.moe.batch import BLOCK_COST, GROUP_COST, Batch
from interlace.moe.kv_cache import BLOCK_SIZE

DTYPES = (torch.float32, torch.bfloat16)


class Pool:
    """Keys and values of several sequences in one pool of scattered blocks.

    With `rope`, values are keys, and a second plane of that width makes keys wider.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        groups: int,
        members: int,
        width: int,
        dtype: torch.dtype,
        rope: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, groups, BLOCK_SIZE, width)
        key = torch.randn(shape, generator=generator).to(dtype)
        self.keys: tuple[torch.Tensor, ...] = (key,)
        self.value = torch.randn(shape, generator=generator).to(dtype)
        if rope:
            second = torch.randn((*shape[:3], rope), generator=generator).to(dtype)
            self.keys, self.value = (key, second), key
        self.scale = (width + rope) ** -0.5
        self.queries = [
            torch.randn(length, groups * members, width + rope, generator=generator).to(dtype)
            for length in lengths
        ]

    def attend(self, *rows: tuple[int, int, int]) -> list[torch.Tensor]:
        """Rows [start, end) of (sequence, start, end) in one batch; each sequence's output."""
        batch = Batch.build(describe(*[([0] * (b - a), a, self.tables[s]) for s, a, b in rows]))
        q = torch.cat([self.queries[s][a:b] for s, a, b in rows])
        out = block_attention(q, self.keys, self.value, batch, scale=self.scale)
        return list(out.split([b - a for _, a, b in rows]))

    def sequence(self, plane: torch.Tensor, number: int) -> torch.Tensor:
        return plane[self.tables[number]].transpose(1, 2).flatten(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "members", "width", "rope"),
    [(1, 1, 64, 0), (2, 3, 32, 0), (4, 2, 16, 0), (1, 8, 48, 16)],
)
def test_block_attention_is_attention(
    groups: int, members: int, width: int, rope: int, dtype: torch.dtype
) -> None:
    pool = Pool(
        [130, 1, 64, 65], groups=groups, members=members, width=width, dtype=dtype, rope=rope
    )
    outputs = pool.attend((0, 0, 130), (1, 0, 1), (2, 60, 64), (3, 64, 65))
    for number, (start, end) in enumerate([(0, 130), (0, 1), (60, 64), (64, 65)]):
        expected = reference_attention(
            pool.queries[number][start:end],
            pool.sequence(torch.cat(pool.keys, -1), number),
            pool.sequence(pool.value, number),
            torch.arange(start, end),
            scale=pool.scale,
        )
        tolerance = 2e-6 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            outputs[number].double(), expected, atol=tolerance, rtol=tolerance
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "members", "width", "rope"),
    [
        (1, 1, 16, 0),
        (1, 1, 64, 0),
        (1, 3, 64, 0),
        (2, 2, 32, 0),
        (3, 3, 64, 0),
        (2, 8, 128, 0),
        (1, 2, 48, 16),
        (1, 8, 512, 64),
    ],
)
def test_bits_do_not_depend_on_chunks_or_neighbours(
    groups: int, members: int, width: int, rope: int, dtype: torch.dtype
) -> None:
    length = 700 if width < 512 else 150
    pool = Pool(
        [length, 90, 1500], groups=groups, members=members, width=width, dtype=dtype, rope=rope
    )
    (expected,) = pool.attend((0, 0, length))
    for size in (1, 2, 5, 8, 9, 31, 32, 33, 64, 300):
        for start in {s for s in (0, 1, 63, 64, 400, length - size) if 0 <= s <= length - size}:
            rows = (0, start, start + size)
            (alone,) = pool.attend(rows)
            first, beside, _ = pool.attend((1, 80, 90), rows, (2, 1400, 1401))
            assert torch.equal(alone, expected[start : start + size]), (start, size)
            assert torch.equal(beside, expected[start : start + size]), (start, size)
            assert torch.equal(first, pool.attend((1, 80, 90))[0])


@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch_gives_each_sequence_its_own_bits(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    pool = Pool([a + n for a, n in rows], groups=2, members=2, width=16, dtype=dtype)
    parts = [(number, a, a + n) for number, (a, n) in enumerate(rows)]
    for part, output in zip(parts, pool.attend(*parts), strict=True):
        assert torch.equal(output, pool.attend(part)[0])


def test_what_lies_after_a_row_never_counts() -> None:
    pool = Pool([100], groups=2, members=2, width=32, dtype=torch.float32)
    (before,) = pool.attend((0, 10, 70))
    last = pool.tables[0][1]
    pool.keys[0][last, :, 6:], pool.value[last, :, 6:] = 1e9, -1e9
    assert torch.equal(pool.attend((0, 10, 70))[0], before)


def test_attention_works_in_parts_of_bounded_size() -> None:
    table = range(32)
    prefill = describe(([0] * 512, 1500, table))
    decode = describe(*[([0], 2000, table)] * 20)
    for description in (prefill, decode):
        batch = Batch.build(description)
        assert len(batch.tiles) > 10
        for group in batch.tiles:
            per_pair = group.tile_rows + BLOCK_COST
            assert len(group.block_P) * per_pair < GROUP_COST + len(table) * per_pair
