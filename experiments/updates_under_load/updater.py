"""Whoever updates, and whoever ends updates in the middle."""

from __future__ import annotations

import ctypes
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from interlace.experiments.updates_under_load.trainer import HOST, start_trainer
from interlace.experiments.updates_under_load.versions import StateTensors, Versions, stacked
from interlace.rollout import Rollout, TrainerGroup, UpdateError, UpdateReport
from interlace.rollout.weights_sync.publisher import ChangeMode

MODES: tuple[ChangeMode, ...] = ("keep", "retract", "abort")
SOURCES = ("one by one", "stacked", "in parts", "folder", "renamed")


class Crash(BaseException):
    """Ends whoever updates."""


@dataclass(slots=True, kw_only=True)
class Course:
    """What has happened so far."""

    weights_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Version -> number of its weights."""
    reports: list[UpdateReport] = field(default_factory=list)
    crashes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When updates were under way, by the clock of this machine's ranks."""


class Updater:
    """One update after another, each from the next source in the next mode."""

    def __init__(self, rollout: Rollout, versions: Versions, root: Path, seed: int) -> None:
        self.course = Course()
        self._rollout, self._versions, self._root = rollout, versions, root
        self._random = random.Random(seed)
        self._members = rollout.config.layout.world + 1
        self._last = 0

    def update(self, nth: int) -> None:
        """One that nobody ends."""
        rollout, version = self._rollout, self._next()
        source, mode = SOURCES[nth % len(SOURCES)], MODES[nth % len(MODES)]
        if source == "renamed":
            number = self.course.weights_of[rollout.version]
            report = rollout.set_version(version)
        else:
            number = version
            report = rollout.update_weights(self._source(source, number), version, mode=mode)
        self._note(report, number)

    def update_from_trainer(self, nth: int) -> None:
        """Another process sends."""
        version, port = self._next(), free_port()
        trainer = start_trainer(self._versions.folder, port, self._members, version)
        try:
            group = TrainerGroup(HOST, port, self._members)
            self._note(
                self._rollout.update_weights(group, version, mode=MODES[nth % len(MODES)]), version
            )
        finally:
            trainer.join()
            if trainer.exitcode:
                self.course.wrong.append(f"the trainer of version {version} failed")

    def crash(self, kind: str) -> None:
        """One whose end comes before its own."""
        before, digest = self._rollout.version, self._rollout.weights_digest
        version = self._next()
        match kind:
            case "trainer":
                self._kill_trainer(version)
            case "thread":
                self._kill_thread(version)
            case "dictionary":
                self._break_off(version)
        self.course.crashes[kind] = self.course.crashes.get(kind, 0) + 1
        after = self._rollout.version
        if after == version and kind == "thread":
            self.course.weights_of[version] = version  # the thread had already said to all: use it
        elif (after, self._rollout.weights_digest) != (before, digest):
            self.course.wrong.append(f"a crash ({kind}) turned version {before} into {after}")

    def _next(self) -> int:
        self._last += self._random.choice((1, 1, 3))
        return self._last

    def _note(self, report: UpdateReport, number: int) -> None:
        now = time.monotonic()
        self.course.spans.append((now - report.total_s, now))
        self.course.reports.append(report)
        self.course.weights_of[report.version] = number
        if report.digest != self._versions.digest(number):
            self.course.wrong.append(f"version {report.version}: another digest than its tensors")

    def _source(self, name: str, number: int) -> StateTensors | Iterator[StateTensors] | Path:
        tensors = self._versions.of(number)
        if name == "stacked":
            return stacked(tensors, self._versions.config.num_experts)
        if name == "in parts":
            return parts(tensors, 3)
        if name == "folder":
            folder = self._root / f"weights-{number % 2}"
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / "model.safetensors")
            return folder
        return tensors

    # ---- ended in the middle

    def _kill_thread(self, version: int) -> None:
        """The thread that updates is ended wherever it is: it may stage, wait or have committed."""
        tensors = self._versions.of(version)
        ended: list[BaseException | None] = []

        def work() -> None:
            try:
                self._rollout.update_weights(tensors, version)
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=work, name="updater")
        thread.start()
        time.sleep(self._random.uniform(0.0, 0.02))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Crash)
        )
        thread.join()
        if any(error is not None and not isinstance(error, Crash) for error in ended):
            self.course.wrong.append(f"version {version}: {ended[0]!r}")
        time.sleep(0.1)  # for what was already agreed

    def _break_off(self, version: int) -> None:
        def broken() -> Iterator[StateTensors]:
            yield from parts(self._versions.of(version), 3)
            raise Crash

        try:
            self._rollout.update_weights(broken(), version)
        except Crash:
            return
        self.course.wrong.append(f"version {version} is in use though its source broke off")

    def _kill_trainer(self, version: int) -> None:
        port = free_port()
        trainer = start_trainer(
            self._versions.folder,
            port,
            self._members,
            version,
            dies_after=self._random.randint(1, 80),
        )
        try:
            self._rollout.update_weights(TrainerGroup(HOST, port, self._members), version)
        except UpdateError:
            return
        finally:
            trainer.join()
        self.course.wrong.append(f"version {version} is in use though its trainer was killed")


def parts(tensors: StateTensors, num: int) -> Iterator[StateTensors]:
    """The tensors in so many dictionaries."""
    names = list(tensors)
    for first in range(num):
        yield {name: tensors[name] for name in names[first::num]}


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
