"""From a scheduler's queues to the rows of one forward pass, by the kinds of work of its path."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.moe.description import Description

from .scheduler import Scheduler


def describe(scheduler: Scheduler, work: Sequence[str]) -> Description:
    """The rows of all kinds of work, in the order named: a mixed path's decode rows come first."""
    described = Description()
    for kind in work:
        rows = scheduler.describe_decode() if kind == "decode" else scheduler.describe_prefill()
        described = _join(described, rows)
    return described


def max_rows(work: Sequence[str], *, decoding: int, chunk_tokens: int) -> int:
    """No group's batch of these kinds has more rows; equal on all ranks, given the plan's number.

    `decoding` is the plan's. How much prefill there will be is not agreed beforehand, so a whole
    chunk is assumed.
    """
    bounds = {"decode": decoding, "prefill": chunk_tokens}
    return sum(bounds[kind] for kind in work)


def _join(first: Description, second: Description) -> Description:
    """Both in one batch, the first's rows before the second's."""
    num = first.num_rows
    return Description(
        input_ids=first.input_ids + second.input_ids,
        positions=first.positions + second.positions,
        cu_seqlens_q=first.cu_seqlens_q + tuple(num + at for at in second.cu_seqlens_q[1:]),
        block_tables=first.block_tables + second.block_tables,
        sample_rows=first.sample_rows + tuple(num + row for row in second.sample_rows),
        block_copies=first.block_copies + second.block_copies,
    )
