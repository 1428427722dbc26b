"""A description as tensors: what the layers of one forward pass index with.

Shapes: T rows, B sequences, S sampled rows, N query tiles, Q rows of a tile, P (tile, block) pairs,
K = 64 positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from . import kernels
from .description import Description
from .kv_cache import BLOCK_SIZE
from .pages import Pages
from .to_device import to_device

TILE_ROWS = (1, 8, 32)
"""Heights of query tiles. A sequence is cut into tiles of the first height it fits into, else the
last: one row is not padded to many, many rows share the reading of a block."""
GROUP_COST = 1024
BLOCK_COST = 16
"""Attention works on parts of about GROUP_COST, a (tile, block) pair costing its query rows plus
BLOCK_COST for the block itself. That bounds its memory whatever the batch, and keeps temporaries
below the size at which every allocation is mapped and cleared anew (measured: three times slower).
"""
ACCELERATOR_GROUP_COST = 32 * GROUP_COST
"""The same where memory is cached and each kernel costs its launch: fewer and larger parts."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGroup:
    """Query tiles of one height, and the KV blocks each of them attends to."""

    num_tiles: int
    tile_rows: int
    num_slots: int
    """Blocks of the longest tile, rounded up to a power of two: leaves of the summation tree."""
    row_M: torch.Tensor
    """[N * Q] batch row of each tile row; the last tile of a sequence repeats its last row."""
    keep_R: torch.Tensor | None
    """[R] tile rows that are no repetition; None: all."""
    tile_P: torch.Tensor
    """[P] tile of each pair."""
    block_P: torch.Tensor
    """[P] KV block of each pair."""
    slot_P: torch.Tensor
    """[P] tile * num_slots + absolute block index."""
    mask_PQK: torch.Tensor
    """[P, Q, 64] float32: 0 where a row may look, minus infinity at later positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one forward pass; padded to equal shares under tensor parallelism."""

    num_rows: int
    """T: rows that are real."""
    num_padded_rows: int
    """T rounded up to a multiple of the tensor-parallel size; padding rows come last."""
    input_ids: torch.Tensor
    """[padded T]"""
    positions: torch.Tensor
    """[padded T]"""
    slot_mapping: torch.Tensor
    """[T] ``block * 64 + offset`` where each row's key and value go."""
    block_tables: torch.Tensor
    """[B, longest table] KV blocks by absolute block index; 0 beyond a table's end."""
    cu_seqlens_q: torch.Tensor
    """[B + 1] where each sequence's rows start and end."""
    context_lens: torch.Tensor
    """[B] positions a sequence has once its rows are written."""
    sample_rows: torch.Tensor
    """[S]"""
    samples_all: bool
    """`sample_rows` are all real rows, in order."""
    tiles: tuple[TileGroup, ...]
    """What attention over planes works on; empty where it is not asked for."""

    @classmethod
    def build(
        cls,
        description: Description,
        *,
        tp_size: int = 1,
        device: str | torch.device = "cpu",
        tiles: bool = True,
        whole_tables: bool = False,
    ) -> Batch:
        """All tensors of a batch, its `tiles` if they are wanted.

        With `whole_tables` attention reads all blocks of a table, though those behind a row's
        position weigh nothing: shapes depend on the tables' lengths alone. Raises ValueError for
        rows outside their block tables.
        """
        rows = _Rows(description)
        num_rows = description.num_rows
        padding = -num_rows % tp_size
        on = torch.device(device)
        return cls(
            num_rows=num_rows,
            num_padded_rows=num_rows + padding,
            input_ids=to_device(_ints(description.input_ids + (0,) * padding), on),
            positions=to_device(_ints(description.positions + (0,) * padding), on),
            slot_mapping=to_device(rows.slot_mapping(), on),
            block_tables=to_device(rows.rectangular_tables(), on),
            cu_seqlens_q=to_device(rows.start_B1, on),
            context_lens=to_device(rows.context_len_B, on),
            sample_rows=to_device(_ints(description.sample_rows), on),
            samples_all=_samples_all(description),
            tiles=tuple(rows.tile_groups(on, whole_tables)) if tiles else (),
        )

    @classmethod
    def in_pages(cls, description: Description, pages: Pages, *, tp_size: int = 1) -> Batch:
        """The same on a CPU without tiles, for attention over pages; ValueError where a table
        names a block that is not in the pool, too.

        In one call, as the host does this between two passes.
        """
        num_rows, tables = description.num_rows, description.block_tables
        num_padded, num = num_rows + -num_rows % tp_size, len(description.cu_seqlens_q) - 1
        width = max(map(len, tables), default=0)
        sizes = (num_padded, num_padded, num_rows, num * width, num + 1, num)
        memory = torch.empty(sum(sizes) + len(description.sample_rows), dtype=torch.int64)
        if not kernels.native.lay_out(
            memory.data_ptr(),
            num_padded,
            width,
            pages.num_blocks,
            description.input_ids,
            description.positions,
            description.cu_seqlens_q,
            tables,
            description.sample_rows,
        ):
            batch = cls.build(description, tp_size=tp_size, tiles=False)
            pages.check(batch.block_tables)
            return batch
        ids, positions, slots, blocks, starts, lengths, samples = memory.split(
            (*sizes, len(description.sample_rows))
        )
        return cls(
            num_rows=num_rows,
            num_padded_rows=num_padded,
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=blocks.view(num, width),
            cu_seqlens_q=starts,
            context_lens=lengths,
            sample_rows=samples,
            samples_all=_samples_all(description),
            tiles=(),
        )


class _Rows:
    """A description as numpy arrays; every method is a handful of whole-array operations."""

    def __init__(self, description: Description) -> None:
        self.position_T = _ints(description.positions)
        self.start_B1 = _ints(description.cu_seqlens_q)
        self.count_B = np.diff(self.start_B1)
        self.table_len_B = _ints([len(table) for table in description.block_tables])
        self.table_start_B = np.cumsum(self.table_len_B) - self.table_len_B
        self.tables = _ints(list(chain.from_iterable(description.block_tables)))
        self._check(description)
        self.context_len_B = self.position_T[self.start_B1[1:] - 1] + 1

    def _check(self, description: Description) -> None:
        num_rows = description.num_rows
        if len(self.position_T) != num_rows or self.start_B1[-1] != num_rows:
            raise ValueError(
                f"{num_rows} input ids, {len(self.position_T)} positions and sequences that end "
                f"at row {self.start_B1[-1]}: all three must agree"
            )
        if len(self.table_len_B) != len(self.count_B) or (self.count_B < 1).any():
            raise ValueError(
                f"{len(self.table_len_B)} block tables for sequences of {self.count_B.tolist()} "
                f"rows: each sequence needs one table and at least one row"
            )
        needed_B = self.position_T[self.start_B1[1:] - 1] // BLOCK_SIZE + 1
        if (needed_B > self.table_len_B).any():
            worst = int(np.argmax(needed_B - self.table_len_B))
            raise ValueError(
                f"sequence {worst} reaches block {needed_B[worst] - 1} of its table, which has "
                f"{self.table_len_B[worst]} blocks"
            )

    def slot_mapping(self) -> Ints:
        start_T = np.repeat(self.table_start_B, self.count_B)
        block_T = self.tables[start_T + self.position_T // BLOCK_SIZE]
        slots: Ints = block_T * BLOCK_SIZE + self.position_T % BLOCK_SIZE
        return slots

    def rectangular_tables(self) -> Ints:
        width = int(self.table_len_B.max(initial=0))
        tables = np.zeros((len(self.table_len_B), width), dtype=np.int64)
        tables[np.arange(width) < self.table_len_B[:, None]] = self.tables
        return tables

    def tile_groups(self, device: torch.device, whole_tables: bool) -> list[TileGroup]:
        groups: list[TileGroup] = []
        lower = 0
        for height in TILE_ROWS:
            upper = np.inf if height == TILE_ROWS[-1] else height
            chosen_B = np.flatnonzero((self.count_B > lower) & (self.count_B <= upper))
            if len(chosen_B):
                groups += self._groups_of_height(chosen_B, height, device, whole_tables)
            lower = height
        return groups

    def _groups_of_height(
        self, chosen_B: Ints, height: int, device: torch.device, whole_tables: bool
    ) -> list[TileGroup]:
        tiles_B = -(-self.count_B[chosen_B] // height)
        sequence_N = np.repeat(chosen_B, tiles_B)
        row_N = self.start_B1[sequence_N] + _counting(tiles_B) * height
        last_N = np.minimum(row_N + height, self.start_B1[sequence_N + 1]) - 1
        num_blocks_N = self.position_T[last_N] // BLOCK_SIZE + 1
        if whole_tables:
            num_blocks_N = self.table_len_B[sequence_N]
        cost_N = num_blocks_N * (height + BLOCK_COST)
        most = GROUP_COST if device.type == "cpu" else ACCELERATOR_GROUP_COST
        part_N = (np.cumsum(cost_N) - cost_N) // most
        cuts = [0, *(np.flatnonzero(np.diff(part_N)) + 1).tolist(), len(part_N)]
        return [
            self._group(sequence_N[a:b], row_N[a:b], last_N[a:b], num_blocks_N[a:b], height, device)
            for a, b in pairwise(cuts)
        ]

    def _group(
        self,
        sequence_N: Ints,
        row_N: Ints,
        last_N: Ints,
        num_blocks_N: Ints,
        height: int,
        device: torch.device,
    ) -> TileGroup:
        num_tiles = len(row_N)
        num_slots = 1 << (int(num_blocks_N.max()) - 1).bit_length()
        row_NQ = row_N[:, None] + np.arange(height)
        keep_NQ = row_NQ <= last_N[:, None]
        row_NQ = np.minimum(row_NQ, last_N[:, None])
        tile_P = np.repeat(np.arange(num_tiles), num_blocks_N)
        index_P = _counting(num_blocks_N)
        block_P = self.tables[self.table_start_B[sequence_N][tile_P] + index_P]
        position_PQ = self.position_T[row_NQ][tile_P]
        key_PK = index_P[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        hidden_PQK = key_PK[:, None, :] > position_PQ[:, :, None]
        mask_PQK = np.where(hidden_PQK, np.float32(-np.inf), np.float32(0))
        return TileGroup(
            num_tiles=num_tiles,
            tile_rows=height,
            num_slots=num_slots,
            row_M=to_device(row_NQ.ravel(), device),
            keep_R=None if keep_NQ.all() else to_device(np.flatnonzero(keep_NQ), device),
            tile_P=to_device(tile_P, device),
            block_P=to_device(block_P, device),
            slot_P=to_device(tile_P * num_slots + index_P, device),
            mask_PQK=to_device(mask_PQK, device),
        )


def _samples_all(description: Description) -> bool:
    num_rows = description.num_rows
    rows = description.sample_rows
    return len(rows) == num_rows and rows == tuple(range(num_rows))


def _counting(counts: Ints) -> Ints:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    result: Ints = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return result


def _ints(values: tuple[int, ...] | list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
