"""Weights on the wire: rows of tensors under the hub's names, several to a bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import torch

from interlace.moe.checkpoint import ITEM_BYTES
from interlace.moe.errors import ModelError
from interlace.moe.received_names import Place, Received, ReceivedNames
from interlace.moe.tensor_digests import begun


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    data: memoryview
    """From row `first` on; not copied when a bucket is unpacked."""


class Sink(Protocol):
    """Takes rows of the model's tensors: to keep them, or to hash them."""

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], first: int, data: memoryview
    ) -> object:
        """Rows from `first` on, in order. Raises `ModelError` for what cannot be."""
        ...


def take_in(sink: Sink, pieces: Iterable[Piece]) -> None:
    """Raises `ModelError` for a piece that cannot be."""
    for piece in pieces:
        sink.add(piece.name, piece.dtype, piece.shape, piece.first, piece.data)


class Origin(Protocol):
    """Tensors that can be sent, under whatever names they have there."""

    def received(self) -> dict[str, Received]:
        """What there is."""
        ...

    def rows(self, name: str, item: int | None, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor, or of an item of it; contiguous, on the CPU."""
        ...


def pieces_of(
    origin: Origin, names: ReceivedNames, bucket_bytes: int, *, complete: bool
) -> Iterator[list[Piece]]:
    """What is in `origin`, in buckets of at most so many bytes, but at least one row.

    Raises `ModelError` before the first bucket for a name, shape or type that the model does not
    have, and with `complete` also if one of its tensors is missing.
    """
    received = origin.received()
    places = names.places(received)
    if complete:
        names.check_complete(places)
    bucket: list[Piece] = []
    room = bucket_bytes
    for name in sorted(places):
        place, shape = places[name], names.shapes[name]
        dtype = received[place.source].dtype
        row_bytes = math.prod(shape[1:]) * ITEM_BYTES[dtype]
        at = 0
        while at < shape[0]:
            if bucket and room < row_bytes:
                yield bucket
                bucket, room = [], bucket_bytes
            num_rows = min(shape[0] - at, max(1, room // row_bytes))
            data = _bytes_of(origin, place, at, at + num_rows)
            bucket.append(Piece(name=name, dtype=dtype, shape=shape, first=at, data=data))
            at += num_rows
            room -= num_rows * row_bytes
    if bucket:
        yield bucket


def tied_head_digest(origin: Origin, names: ReceivedNames, bucket_bytes: int) -> bytes | None:
    """The digest that the embeddings must have if the head in `origin` is tied to them; None if
    there is no such head."""
    received = origin.received()
    head = names.tied_head(received)
    if head is None:
        return None
    embed, dtype = names.hub.embed, received[head].dtype
    sha = begun(embed.name, dtype, embed.shape)
    step = max(1, bucket_bytes // (embed.shape[1] * ITEM_BYTES[dtype]))
    for at in range(0, embed.shape[0], step):
        last = min(at + step, embed.shape[0])
        sha.update(_bytes_of(origin, Place(source=head), at, last))
    digest: bytes = sha.digest()
    return digest


def check_tied(head: bytes | None, embed: bytes | None) -> None:
    """Raises `ModelError` if a head was given that is not what it is tied to."""
    if head is not None and head != embed:
        raise ModelError(
            "tensor lm_head.weight differs from model.embed_tokens.weight, but config.json ties "
            "them: leave it out, or make a model of its own whose config.json does not"
        )


def _bytes_of(origin: Origin, place: Place, first: int, last: int) -> memoryview:
    rows = origin.rows(place.source, place.item, place.first + first, place.first + last)
    return rows.view(-1).view(torch.uint8).numpy().data


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(list[Piece]).decode
