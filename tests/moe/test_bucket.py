"""Decode batches of few shapes: one trace serves a bucket, and padding changes no bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.moe.driving import Ranks, describe, run_together
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.moe import kernels
from interlace.moe.bucket import padded, rounded
from interlace.moe.config import read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description

TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
TABLES = ((3, 5, 7), (1, 9, 2), (4,))


def test_a_bucket_is_the_next_power_of_two() -> None:
    assert [rounded(count) for count in (0, 1, 2, 3, 4, 5, 8, 9, 33)] == [
        0, 1, 2, 4, 4, 8, 8, 16, 64,
    ]  # fmt: skip


def test_padding_repeats_the_last_row_and_rounds_the_tables() -> None:
    description = padded(describe(([9], 130, (6, 2, 8)), ([5], 4, (1,))), 4)
    assert description == Description(
        input_ids=(9, 5, 5, 5),
        positions=(130, 4, 4, 4),
        cu_seqlens_q=(0, 1, 2, 3, 4),
        block_tables=((6, 2, 8, 6), (1,) * 4, (1,) * 4, (1,) * 4),
        sample_rows=(0, 1, 2, 3),
    )
    assert padded(Description(), 8) == Description()


def test_what_is_no_decode_batch_of_the_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 rows of 3 sequences do not fit .* of 2 rows"):
        padded(decode(3, 10), 2)
    with pytest.raises(ValueError, match="2 rows of 1 sequences do not fit"):
        padded(describe(([1, 2], 0, (0,))), 2)


def decode(num: int, at: int) -> Description:
    tables = [table[: at // 64 + 1] for table in TABLES]
    return describe(*[([TOKENS[row]], at, tables[row]) for row in range(num)])


def ranks_of(folder: Path, **options: Any) -> Ranks:
    ranks = Ranks(folder, read_config(folder), **options)
    starts = [(TOKENS[row:][:140], 0, TABLES[row]) for row in range(2)]
    ranks.run(describe(*starts, (TOKENS[2:][:60], 0, TABLES[2])))
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_padding_changes_no_bit(
    native: bool,
    dtype: torch.dtype,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setattr(kernels, "native", None)
    folder = tiny_folders["qwen3_moe"]
    layouts = ({"waits": False}, {"world": 2}, {"world": 2, "tp_size": 2, "waits": False})
    for layout in layouts:
        plain = ranks_of(folder, dtype=dtype)
        ranks = ranks_of(folder, dtype=dtype, dispatch="fixed", **layout)
        for num, at in ((1, 20), (2, 130), (3, 50)):
            description = decode(num, at)
            expected, found = plain.run(description), in_buckets(ranks, description)
            assert torch.equal(found.logits_SV[:num], expected.logits_SV), (layout, num)
            assert torch.equal(found.experts_TLK[:num], expected.experts_TLK), (layout, num)


def in_buckets(ranks: Ranks, description: Description) -> Any:
    plain, ranks.contexts = ranks.contexts, bucketed(ranks)
    try:
        return ranks.run(description)
    finally:
        ranks.contexts = plain


def bucketed(ranks: Ranks) -> list[PathContext]:
    return [replace(context, buckets=True) for context in ranks.contexts]


class Shapes(TorchDispatchMode):
    """The kernels of a pass and the shapes and strides that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), _plain(args), _plain(sorted((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def trace(ranks: Ranks, description: Description, bound: int) -> Sequence[tuple[Any, ...]]:
    """Of the captured part alone; the ranks of the group exchange rows as they do in a step."""
    with torch.inference_mode():
        prepared = [
            ranks.model.prepare(weights, context, description, max_rows=bound)
            for weights, context in zip(ranks.weights, ranks.contexts, strict=True)
        ]
        shapes = Shapes()
        with shapes:
            run_together(
                [
                    ranks.model.compute(weights, context, each)
                    for weights, context, each in zip(
                        ranks.weights, ranks.contexts, prepared, strict=True
                    )
                ],
                ranks.groups,
            )
    return shapes.seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"world": 2, "tp_size": 2}], ids=["one", "two"])
def test_one_trace_serves_a_bucket(
    layout: dict[str, int], tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)
    ranks = ranks_of(tiny_folders["mixtral"], dispatch="fixed", waits=False, **layout)
    ranks.contexts = bucketed(ranks)
    first = trace(ranks, decode(3, 20), 3)
    assert trace(ranks, decode(2, 50), 4) == first, "another batch of the same bucket"
    assert trace(ranks, decode(1, 63), 3) == first
    assert trace(ranks, decode(2, 50), 2) != first, "a bucket of two rows"
    assert trace(ranks, decode(2, 70), 4) != first, "a bucket of two blocks"
