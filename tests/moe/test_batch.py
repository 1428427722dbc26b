"""Descriptions as tensors, against loops that spell them out."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.driving import describe

from interlace.moe import kernels
from interlace.moe.batch import Batch
from interlace.moe.description import Description
from interlace.moe.pages import Pages

SEQUENCES = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 70)), max_size=6)


@given(sequences=SEQUENCES, tp_size=st.integers(1, 4))
def test_a_batch_is_what_its_description_says(
    sequences: list[tuple[int, int]], tp_size: int
) -> None:
    parts = [
        (
            list(range(count)),
            start,
            [7 * number + block for block in range((start + count) // 64 + 1)],
        )
        for number, (start, count) in enumerate(sequences)
    ]
    description = describe(*parts)
    batch = Batch.build(description, tp_size=tp_size)
    assert batch.num_rows == description.num_rows
    assert batch.num_padded_rows % tp_size == 0
    assert 0 <= batch.num_padded_rows - batch.num_rows < tp_size
    assert len(batch.input_ids) == len(batch.positions) == batch.num_padded_rows
    assert tuple(batch.input_ids.tolist()[: batch.num_rows]) == description.input_ids
    assert tuple(batch.positions.tolist()[: batch.num_rows]) == description.positions
    assert tuple(batch.cu_seqlens_q.tolist()) == description.cu_seqlens_q
    assert batch.context_lens.tolist() == [start + count for start, count in sequences]
    assert batch.slot_mapping.tolist() == [
        table[(start + i) // 64] * 64 + (start + i) % 64
        for tokens, start, table in parts
        for i in range(len(tokens))
    ]
    for row, (_, _, table) in zip(batch.block_tables.tolist(), parts, strict=True):
        assert row[: len(table)] == list(table)
        assert not any(row[len(table) :])


@given(sequences=SEQUENCES.filter(bool))
def test_every_row_is_in_one_tile_that_reads_its_blocks(
    sequences: list[tuple[int, int]],
) -> None:
    batch = Batch.build(
        describe(*[([0] * n, a, range(9 * i, 9 * i + 5)) for i, (a, n) in enumerate(sequences)])
    )
    seen = []
    for group in batch.tiles:
        rows = group.row_M.tolist()
        kept = range(len(rows)) if group.keep_R is None else group.keep_R.tolist()
        seen += [rows[i] for i in kept]
        for tile, block, slot, mask_QK in zip(
            group.tile_P.tolist(),
            group.block_P.tolist(),
            group.slot_P.tolist(),
            group.mask_PQK,
            strict=True,
        ):
            index = slot - tile * group.num_slots
            assert 0 <= index < group.num_slots
            for place, row in enumerate(
                rows[tile * group.tile_rows : (tile + 1) * group.tile_rows]
            ):
                sequence = int(torch.searchsorted(batch.cu_seqlens_q, row, right=True)) - 1
                assert block == 9 * sequence + index
                visible = int(batch.positions[row]) - index * 64 + 1
                assert int((mask_QK[place] == 0).sum()) == min(max(visible, 0), 64)
    assert sorted(seen) == list(range(batch.num_rows))


def test_the_empty_description_is_a_batch_without_rows() -> None:
    batch = Batch.build(Description(), tp_size=4)
    assert batch.num_rows == batch.num_padded_rows == 0
    assert batch.tiles == ()
    assert batch.block_tables.shape == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": (63, 64)}, "all three must agree"),
        ({"cu_seqlens_q": (0, 2)}, "all three must agree"),
        ({"cu_seqlens_q": (0, 3, 3)}, "at least one row"),
        ({"block_tables": ((1,), (2,))}, "each sequence needs one table"),
        ({"block_tables": ((1,),)}, "reaches block 1 of its table, which has 1 blocks"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(
    changes: dict[str, tuple[int, ...]], message: str
) -> None:
    description = describe(([1, 2, 3], 63, (4, 5)))
    with pytest.raises(ValueError, match=message):
        Batch.build(replace(description, **changes))  # type: ignore[arg-type]


needs_extension = pytest.mark.skipif(kernels.native is None, reason="there is no extension")


def pages_of(num_blocks: int) -> Pages:
    return Pages(num_layers=1, num_blocks=num_blocks, num_heads=1, width=16, dtype=torch.float32)


@needs_extension
@given(sequences=SEQUENCES, tp_size=st.integers(1, 4), samples=st.sampled_from(["all", "last"]))
def test_a_batch_in_pages_is_the_same_without_tiles(
    sequences: list[tuple[int, int]], tp_size: int, samples: str
) -> None:
    description = describe(
        *[([7] * n, a, range(9 * i, 9 * i + 5)) for i, (a, n) in enumerate(sequences)]
    )
    rows = range(description.num_rows) if samples == "all" else description.cu_seqlens_q[1:]
    if samples == "last":
        rows = [end - 1 for end in rows]
    description = replace(description, sample_rows=tuple(rows))
    expected = Batch.build(description, tp_size=tp_size, tiles=False)
    found = Batch.in_pages(description, pages_of(64), tp_size=tp_size)
    assert found.samples_all == (found.sample_rows.tolist() == list(range(found.num_rows)))
    for field in fields(Batch):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert one.is_contiguous()
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name


@needs_extension
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": (63, 64)}, "all three must agree"),
        ({"cu_seqlens_q": (0, 2)}, "all three must agree"),
        ({"cu_seqlens_q": (0, 3, 3)}, "at least one row"),
        ({"cu_seqlens_q": (0, 4, 3), "block_tables": ((1, 2), (3,))}, "at least one row"),
        ({"block_tables": ((1,), (2,))}, "each sequence needs one table"),
        ({"block_tables": ((1,),)}, "reaches block 1 of its table, which has 1 blocks"),
        ({"block_tables": ((1, 8),)}, "names block 8, the cache has 8"),
        ({"block_tables": ((-1, 2),)}, "names block -1, the cache has 8"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_pages_in_the_same_words(
    changes: dict[str, tuple[int, ...]], message: str
) -> None:
    description = replace(describe(([1, 2, 3], 63, (4, 5))), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Batch.in_pages(description, pages_of(8))
