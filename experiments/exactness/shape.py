"""What is computed: rows of some sequences behind what their caches already hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlace.moe.description import Description
from interlace.moe.kv_cache import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """So many rows of each of some sequences, behind `start` positions."""

    sequences: int
    start: int
    rows: int

    @property
    def name(self) -> str:
        if self.rows == 1:
            return f"decode {self.sequences} behind {self.start}"
        return f"prefill {self.sequences * self.rows}"

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def num_rows(self) -> int:
        return self.sequences * self.rows

    @property
    def blocks_each(self) -> int:
        return -(-self.end // BLOCK_SIZE)

    def description(self, vocab_size: int) -> Description:
        """One sample of each sequence."""
        width = self.blocks_each
        return Description(
            input_ids=tuple((7919 * i + 1) % vocab_size for i in range(self.num_rows)),
            positions=tuple(range(self.start, self.end)) * self.sequences,
            cu_seqlens_q=tuple(range(0, self.num_rows + 1, self.rows)),
            block_tables=tuple(
                tuple(range(i * width, (i + 1) * width)) for i in range(self.sequences)
            ),
            sample_rows=tuple(range(self.rows - 1, self.num_rows, self.rows)),
        )

    def slots_behind(self) -> torch.Tensor:
        """[sequences * start] where the caches' earlier positions lie, sequence by sequence."""
        first = torch.arange(self.sequences)[:, None] * (self.blocks_each * BLOCK_SIZE)
        return (first + torch.arange(self.start)).flatten()
