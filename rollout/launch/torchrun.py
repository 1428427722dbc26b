"""The processes torchrun has started: every one runs the same script, rank 0 plays the episodes.

Rank 0 talks to the other leaders over authenticated sockets whose address and key it leaves in
the store that torchrun already runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path as FilePath

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from interlace.comm.watchdog import EXIT_CODE
from interlace.envs.variables import present
from interlace.rollout.config import RolloutConfig
from interlace.rollout.environments import SubprocessHost
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import (
    Command,
    Event,
    RankFailure,
    RankReport,
    Stop,
    WeightsCommand,
    decode_command,
    decode_event,
    encode,
)

from .interface import choose_interface
from .launcher import EventSink, LaunchError
from .processes import ProcessTransport
from .rank import failure, run_process
from .roll_call import RollCall
from .signal_patience import SignalPatience
from .silent_ranks import GRACE_S

_HELLO = "collector"
_GRACE_S, _REASON_S = 5.0, 0.5
_FAILED_GRACE_S = GRACE_S + 1.0


class TorchrunLauncher:
    """This process's rank, in a thread of its own; the main thread stays the caller's."""

    def __init__(self, config: RolloutConfig, folder: FilePath) -> None:
        """Raises LaunchError when this process was not started by torchrun, or by one with
        another number of processes than `layout.world`."""
        try:
            self._rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
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
        variables = present(config.environments.pass_env)
        self.environment_hosts = functools.partial(SubprocessHost.start, variables=variables)
        self._config, self._folder = config, folder
        self._inbox = Inbox()
        self._killed, self._abandoned = threading.Event(), threading.Event()
        self._connections: dict[int, Connection] = {}
        self._sending = threading.Lock()
        self._told: tuple[WeightsCommand, bytes] | None = None
        self._said = threading.Event()
        self._last_word: RankReport | RankFailure | None = None
        self._rank_thread: threading.Thread | None = None
        self._accepting: threading.Thread | None = None

    def start(self, on_event: EventSink) -> None:
        launch = self._config.launch
        self._roll = RollCall(self._config.layout.world, on_event)
        self._store = self._join_store()
        self._patience = SignalPatience()
        if self.is_driver:
            self._accept(self._listen())
            emit: Callable[[Event], None] = self._roll.take
        else:
            emit = self._connect()
        self._rank_thread = threading.Thread(
            target=self._run, args=(emit,), name=f"interlace rank {self._rank}", daemon=True
        )
        self._rank_thread.start()
        if self.is_driver:
            self._roll.await_ready(launch.connect_timeout_s + launch.load_timeout_s)

    def send(self, leader: int, command: Command) -> None:
        rank = self._config.layout.leader(leader)
        if rank == self._rank:
            self._inbox.put(command)
        else:
            self._send(rank, encode(command))

    def tell(self, rank: int, command: WeightsCommand) -> None:
        if rank == self._rank:
            self._inbox.put(command)
            return
        if self._told is None or self._told[0] is not command:
            self._told = command, encode(command)
        self._send(rank, self._told[1])

    def stop(self) -> None:
        """On rank 0: end the job. Elsewhere: serve until rank 0 ends it."""
        assert self._rank_thread is not None
        try:
            if self.is_driver:
                for leader in range(self.num_leaders):
                    self.send(leader, Stop())
                self._roll.await_ended(self._config.launch.ticket_timeout_s + _GRACE_S)
            self._said.wait()
            if isinstance(self._last_word, RankFailure):
                if self._last_word.diagnosis is not None:
                    raise LaunchError(self._last_word.text, self._last_word.diagnosis)
                gone = self._abandoned.wait(1.0) and "rank 0 is gone or has given up; "
                raise LaunchError(f"{gone or ''}rank {self._rank}: {self._last_word.error}")
            self._patience.end()
        finally:
            self.kill()

    def kill(self) -> None:
        """The other ranks notice by their closed connection to this one."""
        self._killed.set()
        self._roll.close()
        if self._rank_thread is not None and self._rank_thread is not threading.current_thread():
            failed = isinstance(self._last_word, RankFailure)
            self._rank_thread.join(_FAILED_GRACE_S if failed else _GRACE_S)
            if self._rank_thread.is_alive():
                # It stands inside a collective, and so would the end of the interpreter.
                atexit.register(_leave)
        for connection in list(self._connections.values()):
            _hang_up(connection)
        self._connections.clear()
        if self._accepting is not None and self._accepting.is_alive():
            with contextlib.suppress(OSError):  # a call that says nothing, so that it looks up
                socket.create_connection(self._address, _GRACE_S).close()

    def _send(self, rank: int, told: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # a rank's end is told by whoever reads
            if rank in self._connections:
                self._connections[rank].send_bytes(told)

    # ---- this rank

    def _run(self, emit: Callable[[Event], None]) -> None:
        config, rank = self._config, self._rank

        def say(event: Event) -> None:
            if isinstance(event, RankReport | RankFailure):
                self._last_word = event
                self._said.set()  # first: if rank 0 has stopped, telling it may take for ever
            emit(event)

        choose_interface(self._host, self._port)
        try:
            transport = ProcessTransport(
                rank=rank,
                world=config.layout.world,
                store=self._store,
                launch=config.launch,
                engines=config.layout.engines,
            )
        except Exception as error:
            say(failure(rank, error))
            return
        with contextlib.suppress(Exception), transport:  # it was its last word
            # The caller's thread learns of a failure whatever becomes of this one.
            run_process(
                config,
                self._folder,
                transport,
                self._inbox,
                say,
                self._killed,
                exit_after_s=None,
            )

    def _join_store(self) -> Store:
        """The part of torchrun's store that belongs to this rollout and no other of the script."""
        timeout = timedelta(seconds=self._config.launch.connect_timeout_s)
        serves = self.is_driver and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        world, restart = self._config.layout.world, os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        try:
            store = TCPStore(
                self._host,
                self._port,
                world,
                serves,
                timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._rank}: no store at {self._host}:{self._port} within "
                f"{timeout.total_seconds():g} s: {error}"
            ) from error
        number = store.add(f"interlace/{restart}/rollouts of rank {self._rank}", 1)
        return PrefixStore(f"interlace/{restart}/{number}", store)

    # ---- rank 0

    def _listen(self) -> Listener:
        self._check_address()
        key = secrets.token_hex(32)
        listener = Listener(
            (self._host, 0), backlog=self._config.layout.world, authkey=key.encode()
        )
        self._address = listener.address
        self._store.set(_HELLO, f"{self._host} {listener.address[1]} {key}")
        return listener

    def _check_address(self) -> None:
        """A host may know its own name as 127.0.1.1, and others must reach it by that name."""
        local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), self._config.layout.world
        if not local or local == world:
            return
        with contextlib.suppress(OSError):  # whoever listens on it says what is wrong
            address = socket.gethostbyname(self._host)
            if address.startswith("127."):
                raise LaunchError(
                    f"MASTER_ADDR {self._host} is {address} on this host, where ranks on other "
                    "hosts cannot reach it: give torchrun an address of this host, as in "
                    "--master-addr 10.0.0.1"
                )

    def _accept(self, listener: Listener) -> None:
        def serve() -> None:
            awaited = set(range(1, self._config.layout.world))
            with listener:
                while awaited and not self._killed.is_set():
                    try:
                        connection = listener.accept()
                        rank = int(connection.recv_bytes(16))
                    except (AuthenticationError, EOFError, OSError, ValueError):
                        continue  # a stranger; who is missing is found out by the deadline
                    self._connections[rank] = connection
                    awaited.discard(rank)
                    threading.Thread(
                        target=self._read, args=(rank, connection), daemon=True
                    ).start()

        self._accepting = threading.Thread(target=serve, name="interlace accept", daemon=True)
        self._accepting.start()

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                self._roll.take(decode_event(connection.recv_bytes()))
        except (EOFError, OSError):
            self._roll.lost(rank, "its process is gone, or its connection broke")

    # ---- the other ranks

    def _connect(self) -> Callable[[Event], None]:
        timeout = self._config.launch.connect_timeout_s
        try:
            self._store.wait([_HELLO], timedelta(seconds=timeout))
            host, port, key = self._store.get(_HELLO).decode().split()
            connection = Client((host, int(port)), authkey=key.encode())
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"rank {self._rank}: rank 0 cannot be reached within {timeout:g} s: {error}"
            ) from error
        connection.send_bytes(str(self._rank).encode())
        self._connections[0] = connection
        threading.Thread(
            target=self._obey, args=(connection,), name="interlace commands", daemon=True
        ).start()

        def emit(event: Event) -> None:  # from the loop, the watchdog and the one for weights
            with self._sending, contextlib.suppress(OSError):  # `_obey` finds out
                connection.send_bytes(encode(event))

        return emit

    def _obey(self, connection: Connection) -> None:
        try:
            while True:
                self._inbox.put(decode_command(connection.recv_bytes()))
        except (EOFError, OSError):
            # Rank 0 hangs up last if all is well; otherwise there is nobody left to work for.
            self._abandoned.set()
            self._said.wait(_REASON_S)  # its watchdog may know why
            self._killed.set()


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def _hang_up(connection: Connection) -> None:
    """Close it, and let both ends know: a plain close goes unnoticed while a thread reads."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    connection.close()
