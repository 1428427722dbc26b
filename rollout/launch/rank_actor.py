"""One rank as an object that some other process hosts: commands in, events out, all as bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from interlace.rollout.config import RolloutConfig
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Event, decode_command, encode

from .interface import choose_interface
from .processes import ProcessTransport
from .rank import failure, run_process
from .wire import Wire, knock

_EXIT_AFTER_S = 3.0
_BEAT_S = 1.0


class RankActor:
    """Runs its rank in a thread; every method returns soon and may be called while it runs.

    `post` calls must arrive one after the other, and so must `take` calls. Neither is needed once
    there is a wire.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._inbox = Inbox()
        self._events: list[bytes] = []
        self._stirred = threading.Condition()
        self._store: TCPStore | None = None
        self._wire: Wire | None = None

    def hello(self) -> int:
        """The process id; also says that everything could be imported."""
        return os.getpid()

    def listen(self, host: str, world: int) -> int:
        """Host the store of the job on the address `host` of this node, and on no other; a port."""
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            world,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return port

    def connect(self, path: str) -> None:
        """Knock at a door on this host: encoded commands come from there and events go there, an
        empty one where there has been no command for a while. Before `start`."""
        wire = self._wire = Wire(knock(path), patience_s=_BEAT_S)
        name = f"interlace commands of rank {self._rank}"
        threading.Thread(target=self._obey, args=(wire,), name=name, daemon=True).start()

    def start(self, config_json: str, folder: str, host: str, port: int) -> None:
        """Begin: join the store, load, run. What becomes of it is in the events."""
        config = RolloutConfig.model_validate_json(config_json)
        threading.Thread(
            target=self._run,
            args=(config, Path(folder), host, port),
            name=f"interlace rank {self._rank}",
            daemon=True,
        ).start()

    def post(self, commands: list[bytes]) -> None:
        """Put encoded commands into the rank's inbox."""
        for command in commands:
            self._inbox.put(decode_command(command))

    def post_weights(self, command: NDArray[np.uint8]) -> None:
        """One encoded command about weights; large ones stay in the memory they came in."""
        self._inbox.put(decode_command(command.data))

    def take(self, max_wait_s: float) -> list[bytes]:
        """All encoded events since the last call; waits at most so long for the first one."""
        with self._stirred:
            if not self._events:
                self._stirred.wait(max_wait_s)
            events, self._events = self._events, []
        return events

    def live(self) -> None:
        """Never returns: who waits for it learns of the end of this process."""
        threading.Event().wait()

    def _obey(self, wire: Wire) -> None:
        with contextlib.suppress(EOFError):  # Ray ends this process with who had the door
            while True:
                try:
                    self.post(wire.receive())
                except TimeoutError:
                    wire.send(b"")

    def _emit(self, event: Event) -> None:
        if self._wire is not None:
            self._wire.send(encode(event))
            return
        with self._stirred:
            self._events.append(encode(event))
            self._stirred.notify_all()

    def _run(self, config: RolloutConfig, folder: Path, host: str, port: int) -> None:
        world, launch = config.layout.world, config.launch
        choose_interface(host, port)
        try:
            store = self._store or TCPStore(
                host, port, world, timeout=timedelta(seconds=launch.connect_timeout_s)
            )
            transport = ProcessTransport(
                rank=self._rank,
                world=world,
                store=store,
                launch=launch,
                engines=config.layout.engines,
            )
        except Exception as error:
            self._emit(failure(self._rank, error))
            return
        never = threading.Event()  # an actor is ended with its process
        with contextlib.suppress(Exception), transport:  # it was its last word
            run_process(
                config,
                folder,
                transport,
                self._inbox,
                self._emit,
                never,
                exit_after_s=_EXIT_AFTER_S,
            )
