"""A version on its way out of the driver: every source as a series of commands for all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from interlace.moe.config import ModelConfig
from interlace.moe.errors import ModelError
from interlace.moe.received_names import ReceivedNames
from interlace.moe.tensor_digests import TensorDigests
from interlace.rollout.messages import Stage, StageFolder, StageGroup, StageSame

from .attempt import Attempt
from .pieces import Piece, check_tied, pack, pieces_of, take_in, tied_head_digest
from .sources import Folder, StateDict, allowed_folder, check_same_model
from .trainer_group import TrainerGroup

Tensors = Mapping[str, torch.Tensor]
Source = Tensors | Path | Iterable[Tensors] | TrainerGroup
StageCommand = Stage | StageFolder | StageGroup | StageSame


class Outgoing:
    """Checks, hashes and cuts the tensors of one version; counts their bytes."""

    def __init__(self, names: ReceivedNames, bucket_bytes: int) -> None:
        self._names, self._bucket_bytes = names, bucket_bytes
        self._digests = TensorDigests(names.shapes)
        self._head: bytes | None = None
        self.num_bytes = 0

    def stages(
        self, attempt: Attempt, dicts: Iterable[Tensors], *, complete: bool
    ) -> Iterator[Stage]:
        """The commands that carry them, the last one of which says so.

        `complete`: every dictionary is a whole model. Raises `ModelError` for what the model does
        not have, before anything of that dictionary is given out, or what is missing in the end.
        """
        held_back: Stage | None = None
        for index, bucket in enumerate(self._buckets(dicts, complete=complete)):
            if held_back is not None:
                yield held_back
            held_back = Stage(
                attempt=attempt.number,
                version=attempt.version,
                bucket=memoryview(pack(bucket)),
                index=index,
                total=0,
            )
        self.digest()  # or it is not complete
        check_tied(self._head, self._digests.of(self._names.hub.embed.name))
        assert held_back is not None
        yield msgspec.structs.replace(held_back, total=held_back.index + 1)

    def reading(self, folder: Path, config: ModelConfig) -> Iterator[None]:
        """Hash what the ranks read themselves, step by step. Raises `ModelError` in the first step
        unless the folder holds this model."""
        check_same_model(folder, config)
        origin = Folder(folder)
        for bucket in pieces_of(origin, self._names, self._bucket_bytes, complete=True):
            self._count(bucket)
            yield
        head = tied_head_digest(origin, self._names, self._bucket_bytes)
        check_tied(head, self._digests.of(self._names.hub.embed.name))

    def digest(self) -> str:
        """Of all tensors. Raises `ModelError` if one is missing."""
        return self._digests.total()

    def _buckets(self, dicts: Iterable[Tensors], *, complete: bool) -> Iterator[list[Piece]]:
        for tensors in dicts:
            if not isinstance(tensors, Mapping):
                raise ModelError(f"weights come as mappings of tensors, not {type(tensors)}")
            origin = StateDict(tensors)
            for bucket in pieces_of(origin, self._names, self._bucket_bytes, complete=complete):
                self._count(bucket)
                yield bucket
            head = tied_head_digest(origin, self._names, self._bucket_bytes)
            self._head = head or self._head

    def _count(self, bucket: list[Piece]) -> None:
        take_in(self._digests, bucket)
        self.num_bytes += sum(piece.data.nbytes for piece in bucket)


def commands(
    source: Source | None,
    attempt: Attempt,
    outgoing: Outgoing,
    config: ModelConfig,
    *,
    root: str | None,
    world: int,
    timeout_s: float,
) -> Iterator[StageCommand]:
    """What to tell all ranks, in order; None stands for the weights they have.

    Raises `ModelError` before the first command for a source that is not fit as a whole.
    """
    number, version = attempt.number, attempt.version
    match source:
        case None:
            yield StageSame(attempt=number, version=version)
        case TrainerGroup():
            if source.world != world + 1:
                raise ModelError(
                    f"the trainer's group has {source.world} members; the trainer and {world} "
                    f"ranks are {world + 1}"
                )
            yield StageGroup(
                attempt=number,
                version=version,
                host=source.host,
                port=source.port,
                world=source.world,
                timeout_s=timeout_s,
            )
        case Path():
            folder = allowed_folder(source, root)
            reading = outgoing.reading(folder, config)
            next(reading)
            yield StageFolder(attempt=number, version=version, folder=str(folder))
            deque(reading, maxlen=0)  # to its end, while the ranks read too
        case Mapping():
            yield from outgoing.stages(attempt, [source], complete=True)
        case _:
            yield from outgoing.stages(attempt, source, complete=False)
