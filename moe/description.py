"""What a leader tells its peers about one forward pass: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The rows of one forward pass. The default is the empty batch: same program, no rows.

    Rows of one sequence are adjacent and ascending in position. A decode sequence has one row, a
    prefill as many as its chunk.
    """

    input_ids: tuple[int, ...] = ()
    """[T] token ids."""
    positions: tuple[int, ...] = ()
    """[T] absolute positions in their sequences."""
    cu_seqlens_q: tuple[int, ...] = (0,)
    """[B + 1] where each sequence's rows start and end."""
    block_tables: tuple[tuple[int, ...], ...] = ()
    """[B] KV blocks of each sequence, by absolute block index."""
    sample_rows: tuple[int, ...] = ()
    """[S] rows whose logits are wanted."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(from, to): whole KV blocks to copy, in this order, before the first row is written."""

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)
