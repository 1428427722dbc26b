"""The driver's part in an update: to all ranks or to none, in two phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.received_names import ReceivedNames
from interlace.rollout.config import WeightsSection
from interlace.rollout.messages import (
    Commit,
    Discard,
    Installed,
    Stage,
    Staged,
    Taken,
    UpdateMode,
    WeightsCommand,
)

from .arrival import digest_of_model
from .attempt import Attempt
from .barrier import Barrier
from .errors import UpdateError
from .outgoing import Outgoing, Source, StageCommand, commands
from .report import UpdateReport

ChangeMode = Literal["keep", "retract", "abort"]
"""An `UpdateMode` for weights that are other ones."""

_GRACE_S = 5.0
"""Ranks give up first, so that they can say why."""
_LOOK_S = 0.2


class Publisher:
    """One update at a time; `deliver` may be called from any thread."""

    def __init__(
        self,
        *,
        world: int,
        tell: Callable[[int, WeightsCommand], None],
        folder: Path,
        section: WeightsSection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell`: hands a command to a rank. `folder`: of the model that the ranks have started
        with."""
        self.barrier = Barrier(self.stir)
        self._world, self._tell = world, tell
        self._folder, self._section, self._clock = folder, section, clock
        self._model: tuple[ModelConfig, ReceivedNames] | None = None
        self._one_at_a_time = threading.Lock()
        self._stirred = threading.Condition()
        self._attempt: Attempt | None = None
        self._newest_committed = 0
        self._bucket_bytes = section.bucket_mib << 20
        self._uses = [0] * world
        self._digests: dict[int, str] = {}
        self._num_attempts = 0
        self._over = ""

    @property
    def version(self) -> int:
        """In use on all ranks."""
        return min(self._uses)

    @property
    def digest(self) -> str:
        """Of the weights in use on all ranks."""
        version = self.version
        if version not in self._digests:  # those the ranks have started with
            _, names = self._known_model()
            self._digests[version] = digest_of_model(self._folder, names, self._bucket_bytes)
        return self._digests[version]

    def update(
        self, source: Source, version: int | None = None, *, mode: ChangeMode = "keep"
    ) -> UpdateReport:
        """See `Rollout.update_weights`."""
        if mode not in get_args(ChangeMode):
            raise ValueError(f"mode {mode!r} is none of {', '.join(get_args(ChangeMode))}")
        return self._update(source, version, mode)

    def rename(self, version: int) -> UpdateReport:
        """See `Rollout.set_version`."""
        return self._update(None, version, "same")

    def deliver(self, event: Taken | Staged | Installed) -> None:
        """What a rank has said."""
        with self._stirred:
            attempt = self._attempt
            if isinstance(event, Installed):
                self._uses[event.rank] = event.version
                self.barrier.installed(self.version)
                if attempt is not None and attempt.version == event.version:
                    attempt.installed[event.rank] = event
            elif attempt is not None and attempt.number == event.attempt:
                if isinstance(event, Taken):
                    attempt.taken[event.rank] = event.index
                else:
                    attempt.staged[event.rank] = event
            self._stirred.notify_all()

    def end(self, why: str) -> None:
        """No rank will answer any more; updates fail from now on."""
        with self._stirred:
            self._over = self._over or why
            self._stirred.notify_all()

    def stir(self) -> None:
        """Something that is waited for may have happened."""
        with self._stirred:
            self._stirred.notify_all()

    def _known_model(self) -> tuple[ModelConfig, ReceivedNames]:
        if self._model is None:
            config = read_config(self._folder)
            self._model = config, ReceivedNames(config)
        return self._model

    # ---- the phases

    def _update(self, source: Source | None, version: int | None, mode: UpdateMode) -> UpdateReport:
        with self._one_at_a_time:
            self._num_attempts += 1
            attempt = Attempt(number=self._num_attempts, version=self._next(version))
            self._attempt = attempt
            outgoing = Outgoing(self._known_model()[1], self._bucket_bytes)
            began_at = self._clock()
            try:
                digest = self._stage(attempt, source, outgoing)
                staged_at = self._clock()
                self._await_positions(attempt)
                self._commit(attempt, digest, mode)
            except ModelError as error:
                raise UpdateError(f"version {attempt.version} was refused: {error}") from error
            finally:
                self._attempt = None
                if len(attempt.installed) < self._world:
                    self._tell_all(Discard(version=attempt.version))
            done = attempt.installed.values()
            return UpdateReport(
                version=attempt.version,
                mode=mode,
                digest=digest,
                num_bytes=outgoing.num_bytes,
                rank_bytes=tuple(attempt.staged[r].num_bytes for r in range(self._world)),
                stage_s=staged_at - began_at,
                stall_s=max(event.stall_s for event in done),
                total_s=self._clock() - began_at,
                dropped_tokens=sum(event.dropped_tokens for event in done),
                aborted=tuple(sorted(number for event in done for number in event.aborted)),
            )

    def _stage(self, attempt: Attempt, source: Source | None, outgoing: Outgoing) -> str:
        """All ranks hold it, complete and checked; its digest."""
        self._send(attempt, source, outgoing)
        return self._agreed(attempt, outgoing.digest() if outgoing.num_bytes else None)

    def _commit(self, attempt: Attempt, digest: str, mode: UpdateMode) -> None:
        """All ranks use it. From here on its number is spent: ranks that agree on it in a step
        that has begun install it, whatever becomes of this."""
        self._newest_committed, self._digests[attempt.version] = attempt.version, digest
        self._tell_all(Commit(version=attempt.version, mode=mode))
        self._await(attempt, lambda: len(attempt.installed) == self._world, "use it")
        self._digests = {attempt.version: digest}

    def _next(self, version: int | None) -> int:
        oldest = max(self.version, self._newest_committed) + 1
        if version is None:
            return oldest
        if version < oldest:
            raise ValueError(f"version {version} is not newer than {oldest - 1}")
        return version

    def _send(self, attempt: Attempt, source: Source | None, outgoing: Outgoing) -> None:
        """Stage it on all ranks; of buckets one is on its way while the next is being made."""
        for command in self._commands(attempt, source, outgoing):
            if isinstance(command, Stage) and command.index:
                taken = partial(self._taken, attempt, command.index - 1)
                self._await(attempt, taken, "take a bucket")
            self._tell_all(command)

    def _commands(
        self, attempt: Attempt, source: Source | None, outgoing: Outgoing
    ) -> Iterable[StageCommand]:
        return commands(
            source,
            attempt,
            outgoing,
            self._known_model()[0],
            root=self._section.root,
            world=self._world,
            timeout_s=self._section.timeout_s,
        )

    def _taken(self, attempt: Attempt, index: int) -> bool:
        return all(attempt.taken.get(rank, -1) >= index for rank in range(self._world))

    def _agreed(self, attempt: Attempt, mine: str | None) -> str:
        """The digest that all ranks have made; UpdateError if one has another than this side's,
        or than most if they got the weights from elsewhere."""
        self._await(attempt, lambda: len(attempt.staged) == self._world, "hold it")
        theirs = [attempt.staged[rank].digest for rank in range(self._world)]
        wanted = mine or max(sorted(set(theirs)), key=theirs.count)
        others = [rank for rank, digest in enumerate(theirs) if digest != wanted]
        if others:
            raise UpdateError(
                f"version {attempt.version}: rank {', '.join(map(str, others))} received other "
                f"numbers: {theirs[others[0]]}, not {wanted}"
            )
        return wanted

    def _await_positions(self, attempt: Attempt) -> None:
        """Until every trajectory has come to its position; the deadline is for each of them."""
        version = attempt.version
        while missing := self.barrier.missing(version):
            self._await(
                attempt,
                partial(self._others_are_missing, version, missing),
                f"see trajectory {missing[0]} (of {len(missing)}) come to its position",
            )

    def _others_are_missing(self, version: int, than: list[int]) -> bool:
        return self.barrier.missing(version) != than

    def _await(self, attempt: Attempt, done: Callable[[], bool], what: str) -> None:
        deadline = self._clock() + self._section.timeout_s + _GRACE_S
        with self._stirred:
            where = f"version {attempt.version}"
            while True:
                if attempt.refusals:
                    said = "; ".join(f"rank {s.rank}: {s.error}" for s in attempt.refusals)
                    raise UpdateError(f"{where} was refused: {said}")
                if done():
                    return
                if self._over:
                    raise UpdateError(f"{where}: {self._over}")
                if self._clock() > deadline:
                    raise UpdateError(
                        f"{where}: the ranks did not {what} within {self._section.timeout_s:g} s"
                    )
                self._stirred.wait(_LOOK_S)

    def _tell_all(self, command: WeightsCommand) -> None:
        for rank in range(self._world):
            self._tell(rank, command)
