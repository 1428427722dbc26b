"""What a group tells its ranks about one transfer: plain numbers and bytes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What goes to one other group, all of it in one transfer."""

    to: int
    """The rank that leads it; every rank sends to the one with its own place in that group."""
    letters: tuple[bytes, ...]
    """For its leader, in order."""
    blocks: tuple[int, ...]
    """KV blocks of this group ..."""
    into: tuple[int, ...]
    """... and the blocks of that group they are written into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The parcels of one transfer. The default is the empty one: same program, nothing moves."""

    parcels: tuple[Parcel, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    """(from, to): KV blocks of this group to copy before anything is sent or written."""

    @property
    def num_rows(self) -> int:
        """Blocks sent."""
        return sum(len(parcel.blocks) for parcel in self.parcels)
