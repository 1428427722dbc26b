"""The processes torchrun has started: every one runs the same script, rank 0 plays the episodes.

Rank 0 talks to the other leaders over authenticated sockets whose address and key it leaves in
the store that torchrun already runs.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path as FilePath

from torch.distributed.distributed_c10d import PrefixStore, TCPStore

from interlace.rollout.config import RolloutConfig
from interlace.rollout.environments import SubprocessHost
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import (
    Command,
    Event,
    RankFailure,
    RankReady,
    RankReport,
    Stop,
    decode_command,
    decode_event,
    encode,
)

from .launcher import EventSink, LaunchError
from .processes import ProcessTransport
from .rank import run_process

_HELLO = "interlace/collector"


class TorchrunLauncher:
    """This process's rank, in a thread of its own; the main thread stays the caller's."""

    def __init__(self, config: RolloutConfig, folder: FilePath) -> None:
        """Raises LaunchError when this process was not started by torchrun, or by one with
        another number of processes than `layout.world`."""
        try:
            self._rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as error:
            raise LaunchError(
                f"launch.kind is torchrun, but {error.args[0]} is not set: start this with "
                f"torchrun --nproc-per-node {config.layout.world}, or choose ray or local"
            ) from None
        if world != config.layout.world:
            raise LaunchError(
                f"torchrun started {world} processes, layout.world is {config.layout.world}: "
                "make them equal"
            )
        self.num_leaders = config.layout.dp
        self.is_driver = self._rank == 0
        self.environment_hosts = SubprocessHost.start
        self._config, self._folder = config, folder
        self._inbox = Inbox()
        self._connections: dict[int, Connection] = {}
        self._ready, self._done = _Tally(world), _Tally(world)
        self._stopping = threading.Event()
        self._on_event: EventSink = lambda event: None
        self._rank_thread: threading.Thread | None = None
        timeout = timedelta(seconds=config.launch.connect_timeout_s)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(host, port, world, self.is_driver and not agent, timeout)
        self._store = PrefixStore("interlace", store)

    def start(self, on_event: EventSink) -> None:
        self._on_event = on_event
        listener = self._listen() if self.is_driver else None
        emit = self._take if self.is_driver else self._connect()
        if listener is not None:
            self._accept(listener)
        self._rank_thread = threading.Thread(
            target=self._run, args=(emit,), name=f"interlace rank {self._rank}", daemon=True
        )
        self._rank_thread.start()
        if self.is_driver:
            self._ready.wait(
                self._config.launch.load_timeout_s + self._config.launch.connect_timeout_s,
                "have loaded their weights",
            )

    def send(self, leader: int, command: Command) -> None:
        if leader == self._rank:
            self._inbox.put(command)
        else:
            self._connections[leader].send_bytes(encode(command))

    def stop(self) -> None:
        """On rank 0: end the job. Elsewhere: serve until rank 0 ends it."""
        self._stopping.set()
        if self.is_driver:
            for leader in range(self.num_leaders):
                self.send(leader, Stop())
            self._done.wait(self._config.launch.ticket_timeout_s, "have stopped")
        if self._rank_thread is not None:
            self._rank_thread.join()
        if not self.is_driver and (error := self._done.failure):
            raise LaunchError(error)

    def kill(self) -> None:
        for connection in self._connections.values():
            connection.close()

    # ---- this rank

    def _run(self, emit: EventSink) -> None:
        config = self._config
        try:
            transport = ProcessTransport(
                rank=self._rank, world=config.layout.world, store=self._store, launch=config.launch
            )
            run_process(config, self._folder, transport, self._inbox, emit)
            transport.close()
        except Exception as error:
            # run_process has sent its own last word; this one is for what happens outside it.
            self._done.fail(f"rank {self._rank}: {type(error).__name__}: {error}")

    # ---- rank 0

    def _listen(self) -> Listener:
        key = secrets.token_hex(32)
        host = os.environ["MASTER_ADDR"]
        loopback = host in ("localhost", "127.0.0.1", "::1")
        listener = Listener(
            ("127.0.0.1" if loopback else socket.gethostname(), 0), authkey=key.encode()
        )
        address, port = listener.address
        self._store.set(_HELLO, f"{address} {port} {key}")
        return listener

    def _accept(self, listener: Listener) -> None:
        others = self._config.layout.world - 1

        def serve() -> None:
            accepted = 0
            while accepted < others:
                try:
                    connection = listener.accept()
                except AuthenticationError:
                    continue
                except OSError:
                    return
                rank = int(connection.recv_bytes(16))
                self._connections[rank] = connection
                accepted += 1
                threading.Thread(target=self._read, args=(rank, connection), daemon=True).start()
            listener.close()

        threading.Thread(target=serve, name="interlace accept", daemon=True).start()

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                self._take(decode_event(connection.recv_bytes()))
        except (EOFError, OSError):
            if not self._done.has(rank):
                lost = f"rank {rank} is gone: its process ended or its connection broke"
                self._take(RankFailure(rank=rank, error=lost, traceback=""))

    def _take(self, event: Event) -> None:
        match event:
            case RankReady():
                self._ready.add(event.rank)
            case RankReport():
                self._done.add(event.rank)
            case RankFailure():
                self._ready.fail(f"rank {event.rank}: {event.error}")
                self._done.fail(f"rank {event.rank}: {event.error}")
        self._on_event(event)

    # ---- the other ranks

    def _connect(self) -> Callable[[Event], None]:
        self._store.wait([_HELLO], timedelta(seconds=self._config.launch.connect_timeout_s))
        host, port, key = self._store.get(_HELLO).decode().split()
        connection = Client((host, int(port)), authkey=key.encode())
        connection.send_bytes(str(self._rank).encode())
        sending = threading.Lock()

        def read() -> None:
            try:
                while True:
                    self._inbox.put(decode_command(connection.recv_bytes()))
            except (EOFError, OSError):
                # Rank 0 is gone or done: either way nothing more will be asked.
                self._inbox.put(Stop())

        def emit(event: Event) -> None:
            with sending:
                connection.send_bytes(encode(event))

        threading.Thread(target=read, name="interlace commands", daemon=True).start()
        return emit


class _Tally:
    """Waits until every rank has been counted, or one has failed."""

    def __init__(self, world: int) -> None:
        self.failure: str | None = None
        self._world = world
        self._ranks: set[int] = set()
        self._changed = threading.Condition()

    def add(self, rank: int) -> None:
        with self._changed:
            self._ranks.add(rank)
            self._changed.notify_all()

    def has(self, rank: int) -> bool:
        return rank in self._ranks

    def fail(self, why: str) -> None:
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()

    def wait(self, seconds: float, what: str) -> None:
        """Raises LaunchError for a failure, or naming the ranks that are missing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or len(self._ranks) == self._world, seconds
            )
            if self.failure is not None:
                raise LaunchError(self.failure)
            missing = sorted(set(range(self._world)) - self._ranks)
            if missing:
                raise LaunchError(
                    f"ranks {missing} of {self._world} do not {what} in {seconds:g} s"
                )
