"""All ranks in this process, those that step together in a LocalWorld: the same loop without
processes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as FilePath
from typing import Any

import msgspec
import torch

from interlace.comm.communicator import Communicator
from interlace.comm.testing import LocalWorld
from interlace.comm.waiter import RankWaiter, SleepWaiter
from interlace.envs.variables import present
from interlace.rollout.config import RolloutConfig
from interlace.rollout.environments import SubprocessHost
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Command, RankFailure, Stop, WeightsCommand

from .compose import SLOTS, Rank, blocks_for, compose
from .launcher import EventSink, LaunchError
from .rank import failure, report
from .transport import AMPLE, Carrier, Groups


class LocalTransport:
    """One rank's ends of a LocalWorld."""

    device = torch.device("cpu")
    carrier = Carrier(kind="local", why="all ranks are in this process")

    def __init__(
        self, world: LocalWorld, rank: int, killed: threading.Event, engine: Sequence[int] = ()
    ) -> None:
        """`engine`: the ranks that step together with this one; by default all."""
        self.rank = rank
        self.waiter: RankWaiter = SleepWaiter()
        self.posts = None
        self._world, self._killed = world, killed
        self._engine = engine or range(world.size)

    def control(self, timeout_s: float) -> Communicator:
        return self._world.communicator("control", self._engine, self.rank)

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
    """Ranks as coroutines, in an order drawn from `launch.interleaving_seed`: those that step
    together in one thread, so in mode replicas in a thread for each."""

    is_driver = True

    def __init__(self, config: RolloutConfig, folder: FilePath) -> None:
        self.num_leaders = config.layout.dp
        variables = present(config.environments.pass_env)
        self.environment_hosts = functools.partial(SubprocessHost.start, variables=variables)
        self._config, self._folder = config, folder
        self._inboxes = [Inbox() for _ in range(config.layout.world)]
        self._killed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._left = threading.Lock()

    def start(self, on_event: EventSink) -> None:
        num_blocks = blocks_for(self._config, self._folder, LocalTransport.device)
        engines = []
        for members in self._config.layout.engines:
            world = self._world()
            ranks = [
                compose(
                    self._config,
                    self._folder,
                    LocalTransport(world, number, self._killed, members),
                    self._inboxes[number],
                    on_event,
                    num_blocks=num_blocks,
                )
                for number in members
            ]
            engines.append((world, ranks))
        for _, ranks in engines:
            for rank in ranks:
                on_event(rank.ready)
        self._counted_at, self._running = time.process_time(), len(engines)
        for engine in engines:
            thread = threading.Thread(
                target=self._run, args=(*engine, on_event), name="interlace ranks", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def send(self, leader: int, command: Command) -> None:
        self._inboxes[self._config.layout.leader(leader)].put(command)

    def tell(self, rank: int, command: WeightsCommand) -> None:
        self._inboxes[rank].put(command)

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(Stop())
        timeout_s = self._config.launch.ticket_timeout_s
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.kill()
            raise LaunchError(f"the ranks did not stop within {timeout_s:g} s")

    def kill(self) -> None:
        self._killed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _world(self) -> LocalWorld:
        launch = self._config.launch
        return LocalWorld(
            self._config.layout.world,
            split=_split,
            concat=_concat,
            copy=_copy,
            seed=launch.interleaving_seed,
            slots=SLOTS,
            serial_slots=launch.serial_device_slots,
            verify="L2" not in self._config.unsafe.without,
        )

    def _run(self, world: LocalWorld, ranks: Sequence[Rank], on_event: EventSink) -> None:
        # One thread a rank, and the ranks share this one: the bits of a large batch depend on it.
        torch.set_num_threads(1)
        leader = ranks[0].engine.rank
        try:
            with ExitStack() as stagers:
                for rank in ranks:
                    stagers.enter_context(rank.stager)
                journals = world.run(
                    [rank.engine.run() for rank in ranks], on_park=lambda: self._pause(leader)
                )
        except _Killed:
            return
        except Exception as error:
            on_event(self._told(failure(leader, error)))
            return
        cpu_s = self._cpu_s()
        for rank, journal in zip(ranks, journals, strict=True):
            on_event(report(rank.engine.rank, journal, cpu_s))
            cpu_s = 0.0

    def _cpu_s(self) -> float:
        """The seconds of this process: they are counted once, by the last of its engines."""
        with self._left:
            self._running -= 1
            return 0.0 if self._running else time.process_time() - self._counted_at

    def _told(self, found: RankFailure) -> RankFailure:
        engines = self._config.layout.engines
        if len(engines) == 1:
            return found
        number = next(n for n, ranks in enumerate(engines) if found.rank in ranks)
        error = f"replica {number} of {len(engines)}: {found.error}"
        return msgspec.structs.replace(found, error=error)

    def _pause(self, leader: int) -> None:
        # Everybody is parked: whichever inbox stirs first, two milliseconds are soon enough.
        self._inboxes[leader].wait(0.002)
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
