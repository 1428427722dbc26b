"""The program of a transfer: KV blocks and letters between groups that have no path in common.

Shapes: W ranks, N blocks sent or received, E bytes of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from interlace.comm.collectives import Exchange, Gather, perform
from interlace.moe.context import PathContext

from .shipment import Parcel, Shipment


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """What a transfer has brought this rank; the blocks are written."""

    letters: tuple[tuple[int, bytes], ...]
    """(leader of the group that sent it, letter), by sender, each one's in order."""


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What travels beside the blocks from one rank to another."""

    leader: int
    into: tuple[int, ...]
    letters: tuple[bytes, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


async def transfer(context: PathContext, shipment: Shipment) -> Transferred:
    """Send the parcels and write the blocks that others send here.

    Three collectives over role "all", whatever the shipment: how many bytes of notes and how many
    blocks go from whom to whom, the notes, and the blocks. Which blocks of this rank are written is
    for the sender to say: it was told when they were reserved.
    """
    kv, rank, world = context.kv, context.ep_rank, context.ep_size
    kv.copy_blocks(shipment.block_copies)
    device = kv.device
    parcels = {parcel.to + context.tp_rank: parcel for parcel in shipment.parcels}
    order = sorted(parcels)
    leader = rank - context.tp_rank
    notes = {to: _encode(_note(leader, parcels[to], context.tp_rank == 0)) for to in order}
    sent_W2 = torch.zeros((world, 2), dtype=torch.int64)
    for to in order:
        sent_W2[to] = torch.tensor((len(notes[to]), len(parcels[to].blocks)))
    gathered = await perform(Gather(role="all", stage="counts", payload=sent_W2.to(device)))
    received_W2 = torch.stack([counts_W2[rank] for counts_W2 in gathered]).tolist()
    written = bytearray().join(notes[to] for to in order)
    payload = torch.frombuffer(written, dtype=torch.uint8) if written else torch.empty(0).byte()
    num_bytes = tuple(num for num, _ in received_W2)
    arrived = await perform(
        Exchange(
            role="all",
            stage="notes",
            payload=payload.to(device),
            send=tuple(sent_W2[:, 0].tolist()),
            recv=num_bytes,
        )
    )
    read = [_decode(part.numpy().tobytes()) for part in arrived.cpu().split(num_bytes) if len(part)]
    rows_NE = await perform(
        Exchange(
            role="all",
            stage="blocks",
            payload=kv.read_blocks([block for to in order for block in parcels[to].blocks]),
            send=tuple(sent_W2[:, 1].tolist()),
            recv=tuple(num for _, num in received_W2),
        )
    )
    kv.write_blocks([block for note in read for block in note.into], rows_NE)
    # The host waits here: another path, on another stream, may read the blocks in the next step.
    torch.zeros((), device=device).item()
    return Transferred(
        letters=tuple((note.leader, letter) for note in read for letter in note.letters)
    )


def _note(leader: int, parcel: Parcel, leads: bool) -> _Note:
    """Only leaders read letters."""
    return _Note(leader, parcel.into, parcel.letters if leads else ())
