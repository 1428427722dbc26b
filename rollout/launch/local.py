"""All ranks in this process, in a LocalWorld: the same loop without processes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import torch

from interlace.comm.communicator import Communicator
from interlace.comm.testing import LocalWorld
from interlace.comm.waiter import SleepWaiter, Waiter
from interlace.envs.variables import present
from interlace.rollout.config import RolloutConfig
from interlace.rollout.environments import SubprocessHost
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Command, Stop

from .compose import SLOTS, Rank, blocks_for, compose
from .launcher import EventSink, LaunchError
from .rank import failure, report
from .transport import AMPLE, Carrier, Groups


class LocalTransport:
    """One rank's ends of a LocalWorld."""

    device = torch.device("cpu")
    carrier = Carrier(kind="local", why="all ranks are in this process")

    def __init__(self, world: LocalWorld, rank: int, killed: threading.Event) -> None:
        self.rank = rank
        self.waiter: Waiter = SleepWaiter()
        self.posts = None
        self._world, self._killed = world, killed

    def control(self, timeout_s: float) -> Communicator:
        return self._world.communicator("control", range(self._world.size), self.rank)

    def group_control(self, groups: Groups, timeout_s: float, name: str = "group") -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        return self._world.communicator(("control", name), mine, self.rank)

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        return self._world.communicator((path, role), mine, self.rank)

    @contextmanager
    def around(self, path: str) -> Iterator[None]:
        if self._killed.is_set():
            raise _Killed
        with torch.inference_mode():
            yield

    def clock(self) -> float:
        return time.monotonic()


class LocalLauncher:
    """Ranks as coroutines of one thread, in an order drawn from `launch.interleaving_seed`."""

    is_driver = True

    def __init__(self, config: RolloutConfig, folder: FilePath) -> None:
        self.num_leaders = config.layout.dp
        variables = present(config.environments.pass_env)
        self.environment_hosts = functools.partial(SubprocessHost.start, variables=variables)
        self._config, self._folder = config, folder
        self._inboxes = [Inbox() for _ in range(config.layout.world)]
        self._killed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_event: EventSink) -> None:
        launch = self._config.launch
        world = LocalWorld(
            self._config.layout.world,
            split=_split,
            concat=_concat,
            copy=_copy,
            seed=launch.interleaving_seed,
            slots=SLOTS,
            serial_slots=launch.serial_device_slots,
            verify="L2" not in self._config.unsafe.without,
        )
        num_blocks = blocks_for(self._config, self._folder, LocalTransport.device)
        ranks = [
            compose(
                self._config,
                self._folder,
                LocalTransport(world, number, self._killed),
                inbox,
                on_event,
                num_blocks=num_blocks,
            )
            for number, inbox in enumerate(self._inboxes)
        ]
        for rank in ranks:
            on_event(rank.ready)
        self._thread = threading.Thread(
            target=self._run, args=(world, ranks, on_event), name="interlace ranks", daemon=True
        )
        self._thread.start()

    def send(self, leader: int, command: Command) -> None:
        self._inboxes[self._config.layout.leader(leader)].put(command)

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(Stop())
        if self._thread is not None:
            self._thread.join(self._config.launch.ticket_timeout_s)
            if self._thread.is_alive():
                self.kill()
                raise LaunchError(
                    f"the ranks did not stop within {self._config.launch.ticket_timeout_s:g} s"
                )

    def kill(self) -> None:
        self._killed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, world: LocalWorld, ranks: Sequence[Rank], on_event: EventSink) -> None:
        # One thread a rank, and the ranks share this one: the bits of a large batch depend on it.
        torch.set_num_threads(1)
        ready_at = time.process_time()
        try:
            journals = world.run([rank.engine.run() for rank in ranks], on_park=self._pause)
        except _Killed:
            return
        except Exception as error:
            on_event(failure(0, error))
            return
        cpu_s = time.process_time() - ready_at
        for number, journal in enumerate(journals):
            on_event(report(number, journal, 0.0 if number else cpu_s))

    def _pause(self) -> None:
        # Everybody is parked: whichever inbox stirs first, two milliseconds are soon enough.
        self._inboxes[0].wait(0.002)
        if self._killed.is_set():
            raise _Killed


class _Killed(Exception):
    """Ends the thread of the ranks."""


def _split(payload: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split(payload, list(counts))


def _concat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def _copy(part: Any) -> Any:
    return part.clone() if isinstance(part, torch.Tensor) else part
