"""One version on its way to a rank, from whatever source."""

from __future__ import annotations

from pathlib import Path

from interlace.moe.config import ModelConfig
from interlace.moe.incoming import Incoming, Share
from interlace.moe.received_names import ReceivedNames
from interlace.moe.tensor_digests import TensorDigests

from .pieces import check_tied, pieces_of, take_in, tied_head_digest
from .sources import Folder, check_same_model


def read_folder(
    folder: Path,
    config: ModelConfig,
    names: ReceivedNames,
    share: Share,
    bucket_bytes: int,
) -> Incoming:
    """A rank's own of the folder; all of it is read, checked and hashed."""
    check_same_model(folder, config)
    origin, incoming = Folder(folder), Incoming(share)
    for bucket in pieces_of(origin, names, bucket_bytes, complete=True):
        take_in(incoming, bucket)
    head = tied_head_digest(origin, names, bucket_bytes)
    check_tied(head, incoming.digest_of(names.hub.embed.name))
    return incoming


def digest_of_model(folder: Path, names: ReceivedNames, bucket_bytes: int) -> str:
    """The digest of the model that is in `folder`, whatever else lies there."""
    digests = TensorDigests(names.shapes)
    for bucket in pieces_of(Folder(folder, names), names, bucket_bytes, complete=True):
        take_in(digests, bucket)
    return digests.total()
