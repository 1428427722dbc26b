"""Decode batches of few shapes: one captured graph serves every batch of a bucket.

A bucket is a pure function of the plan's bound on decode rows, so all ranks exchange blocks of the
same size. How many blocks of context are read is a rank's own affair: no collective depends on it.
"""

from __future__ import annotations

from dataclasses import replace

from .description import Description


def rounded(count: int) -> int:
    """The next power of two; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count else 0


def padded(description: Description, num_rows: int) -> Description:
    """`num_rows` rows, and tables that all have a rounded number of blocks.

    The last row is repeated, as sequences of one row each: the same numbers are written to the same
    places again, and what comes out behind the real rows nobody asks for. Tables go on with their
    own first block. An empty description stays empty: a rank without rows has a graph of its own.
    ValueError if there are more rows already, or a sequence of several: those are no decode rows.
    """
    real = description.num_rows
    if real > num_rows or len(description.block_tables) != real:
        raise ValueError(
            f"{real} rows of {len(description.block_tables)} sequences do not fit a decode bucket "
            f"of {num_rows} rows: the ranks agreed on fewer, or this is a prefill"
        )
    if not real:
        return description
    width = rounded(max(len(table) for table in description.block_tables))
    tables = tuple(table + table[:1] * (width - len(table)) for table in description.block_tables)
    more = num_rows - real
    return replace(
        description,
        input_ids=description.input_ids + description.input_ids[-1:] * more,
        positions=description.positions + description.positions[-1:] * more,
        cu_seqlens_q=tuple(range(num_rows + 1)),
        block_tables=tables + tables[-1:] * more,
        sample_rows=description.sample_rows + tuple(range(real, num_rows)),
    )
