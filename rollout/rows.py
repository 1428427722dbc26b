"""The rows of sequences in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from interlace.moe.description import Description

from .sequence import Sequence as Turn


class Rows(NamedTuple):
    """The rows of one sequence: its tokens from `start` to `stop`."""

    sequence: Turn
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """The last of them is the sequence's last: a token is drawn behind it."""
        return self.stop == len(self.sequence.token_ids)


def describe_rows(rows: Sequence[Rows], copies: Iterable[tuple[int, int]]) -> Description:
    """What a forward pass is told; every sequence has a lease."""
    ids: list[int] = []
    positions: list[int] = []
    bounds, sample_rows = [0], []
    tables = []
    for item in rows:
        assert item.sequence.lease is not None
        ids += item.sequence.token_ids[item.start : item.stop]
        positions += range(item.start, item.stop)
        bounds.append(len(ids))
        tables.append(tuple(item.sequence.lease.block_table))
        if item.samples:
            sample_rows.append(len(ids) - 1)
    return Description(
        input_ids=tuple(ids),
        positions=tuple(positions),
        cu_seqlens_q=tuple(bounds),
        block_tables=tuple(tables),
        sample_rows=tuple(sample_rows),
        block_copies=tuple(copies),
    )
