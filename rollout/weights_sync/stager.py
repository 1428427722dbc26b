"""A rank's part in an update: takes new weights in while its loop goes on with the old ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from interlace.moe.config import ModelConfig
from interlace.moe.errors import ModelError
from interlace.moe.incoming import Incoming, Share
from interlace.moe.received_names import ReceivedNames
from interlace.moe.weights import Weights, next_weights
from interlace.rollout.changed import Changed
from interlace.rollout.config import WeightsSection
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import (
    Commit,
    Discard,
    Event,
    Installed,
    Stage,
    Staged,
    StageFolder,
    StageGroup,
    StageSame,
    Taken,
    UpdateMode,
    WeightsCommand,
)

from .arrival import digest_of_model, read_folder
from .errors import UpdateError
from .pieces import take_in, unpack
from .shelf import Shelf
from .sources import allowed_folder
from .trainer_group import TrainerGroup

_LEAVE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What a rank is to answer."""

    attempt: int
    version: int
    began_at: float


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """A version that comes in buckets."""

    task: _Task
    incoming: Incoming
    num_buckets: int = 0


class Stager:
    """Obeys the commands about weights in a thread of its own, and is the `Updates` of the loop.

    Says `Staged` once for every version that it is told to stage, whatever becomes of it.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: Path,
        config: ModelConfig,
        section: WeightsSection,
        weights: Weights,
        inbox: Inbox,
        emit: Callable[[Event], None],
    ) -> None:
        """`folder`: where `weights`, the first in use, were loaded from."""
        self._rank, self._folder = rank, folder
        self._config, self._section = config, section
        self._inbox, self._emit = inbox, emit
        self._shelf = Shelf(weights)
        self._arriving: _Arriving | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name=f"interlace weights of rank {rank}", daemon=True
        )

    @cached_property
    def _names(self) -> ReceivedNames:
        return ReceivedNames(self._config)

    @cached_property
    def _share(self) -> Share:
        return Share.of(self._config, self._shelf.in_use.expert_ids)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It leaves behind its command; after an error, or inside a trainer's group, without us."""
        self._leaving.set()
        self._inbox.rouse()
        if error is None:
            self._thread.join(_LEAVE_S)

    # ---- the loop asks

    def ready(self) -> int:
        """See Updates."""
        return self._shelf.ready()

    def install(self, version: int) -> Weights:
        """See Updates."""
        return self._shelf.install(version)

    def mode_of(self, version: int) -> UpdateMode:
        """See Updates."""
        return self._shelf.mode_of(version)

    def installed(self, version: int, *, step: int, stall_s: float, changed: Changed) -> None:
        """See Updates."""
        self._emit(
            Installed(
                rank=self._rank,
                version=version,
                step=step,
                stall_s=stall_s,
                dropped_tokens=changed.dropped_tokens,
                aborted=list(changed.aborted),
            )
        )

    # ---- in the thread

    def _serve(self) -> None:
        torch.set_num_threads(1)  # the loop's core is shared, others are not ours
        while not self._leaving.is_set():
            command = self._inbox.take_weights()
            if command is not None:
                self._obey(command)

    def _obey(self, command: WeightsCommand) -> None:
        arriving = self._arriving
        if arriving is not None and _begins(command):
            self._tell(arriving.task, error="another one came")
        match command:
            case Stage():
                self._stage(command)
            case StageFolder():
                self._whole(command, lambda: self._from_folder(command))
            case StageGroup():
                self._whole(command, lambda: self._from_group(command))
            case StageSame():
                self._same(_task(command))
            case Commit():
                self._shelf.commit(command.version, command.mode)
            case Discard():
                if arriving is not None and arriving.task.version == command.version:
                    self._tell(arriving.task, error="it was discarded")
                self._shelf.discard(command.version)

    def _stage(self, command: Stage) -> None:
        if command.index == 0:
            self._arriving = _Arriving(task=_task(command), incoming=Incoming(self._share))
        arriving = self._arriving
        if arriving is None or arriving.task.attempt != command.attempt:
            return  # refused or discarded before
        try:
            if command.index != arriving.num_buckets:
                raise UpdateError(
                    f"bucket {command.index} came behind {arriving.num_buckets} others"
                )
            take_in(arriving.incoming, unpack(command.bucket))
            arriving.num_buckets += 1
            if arriving.num_buckets == command.total:
                self._keep(arriving.task, arriving.incoming)
        except Exception as error:
            self._tell(arriving.task, error=_one_line(error))
            return
        self._emit(Taken(rank=self._rank, attempt=command.attempt, index=command.index))

    def _whole(self, command: StageFolder | StageGroup, read: Callable[[], Incoming]) -> None:
        task = _task(command)
        try:
            self._keep(task, read())
        except Exception as error:
            self._tell(task, error=_one_line(error))

    def _from_folder(self, command: StageFolder) -> Incoming:
        section = self._section
        folder = allowed_folder(Path(command.folder), section.root)
        bucket_bytes = section.bucket_mib << 20
        return read_folder(folder, self._config, self._names, self._share, bucket_bytes)

    def _from_group(self, command: StageGroup) -> Incoming:
        group = TrainerGroup(command.host, command.port, command.world)
        incoming = Incoming(self._share)
        # Whatever comes behind this command says that nobody waits for it any more.
        for item in group.receive(
            self._rank,
            command.version,
            command.timeout_s,
            given_up=lambda: self._inbox.has_weights or self._leaving.is_set(),
        ):
            if not isinstance(item, str):
                take_in(incoming, item)
            elif item != incoming.total():
                raise UpdateError(f"what arrived has digest {incoming.total()}, not {item}")
        return incoming

    def _keep(self, task: _Task, incoming: Incoming) -> None:
        digest, num_bytes = incoming.total(), incoming.num_bytes
        weights = next_weights(self._shelf.in_use, incoming, self._config, version=task.version)
        self._shelf.put(weights, digest)
        self._tell(task, digest=digest, num_bytes=num_bytes)

    def _same(self, task: _Task) -> None:
        try:
            digest = self._shelf.digest or digest_of_model(
                self._folder, self._names, self._section.bucket_mib << 20
            )
        except ModelError as error:
            self._tell(task, error=_one_line(error))
            return
        self._shelf.put(replace(self._shelf.in_use, version=task.version), digest)
        self._tell(task, digest=digest)

    def _tell(
        self,
        task: _Task,
        *,
        digest: str = "",
        num_bytes: int = 0,
        error: str | None = None,
    ) -> None:
        self._arriving = None
        self._emit(
            Staged(
                rank=self._rank,
                attempt=task.attempt,
                version=task.version,
                digest=digest,
                num_bytes=num_bytes,
                seconds=time.monotonic() - task.began_at,
                error=error,
            )
        )


def _task(command: Stage | StageFolder | StageGroup | StageSame) -> _Task:
    return _Task(attempt=command.attempt, version=command.version, began_at=time.monotonic())


def _begins(command: WeightsCommand) -> bool:
    return not isinstance(command, (Commit, Discard)) and not (
        isinstance(command, Stage) and command.index
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, (ModelError, UpdateError)) else f"{type(error).__name__}: {text}"
    )
