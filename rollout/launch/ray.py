"""Ranks and environments as Ray actors: on this machine, or on a cluster that runs already.

One placement group holds a bundle for each rank and each environment process; ranks that follow one
another share a node. Our messages cross as bytes; Ray's own serialisation carries nothing but
numbers, text and bytes. Between processes of this node, which at one time would take a call of Ray
each, they go past it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from interlace.comm.process_state import is_stopped
from interlace.envs.variables import present
from interlace.rollout.config import RolloutConfig
from interlace.rollout.environments import EnvironmentHost, HostDied
from interlace.rollout.messages import (
    Command,
    RankFailure,
    RankReport,
    Stop,
    WeightsCommand,
    decode_event,
    encode,
)

from .across_hosts import RANK_RESOURCE
from .environment_actor import EnvironmentActor
from .environment_line import EnvironmentLine
from .launcher import EventSink, LaunchError
from .rank_actor import RankActor
from .roll_call import RollCall
from .wire import Door, Wire, socket_folder

_POLL_S = 1.0
_GRACE_S = 5.0
_OBJECT_STORE_BYTES = 256 * 1024**2


class RayLauncher:
    """One actor a rank, one an environment process; they end with this process at the latest."""

    is_driver = True

    def __init__(self, config: RolloutConfig, folder: Path) -> None:
        """`folder` must hold the model on every node."""
        self.num_leaders = config.layout.dp
        self.environment_hosts = self._start_host
        self._config, self._folder = config, folder
        self._bundles = _bundles(config)
        self._cluster: Cluster | None = None
        self._group: Any = None
        self._seats: list[int] = []  # of each rank: its bundle
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._wires: dict[int, Wire] = {}  # to the ranks of this node
        self._readers: list[threading.Thread] = []
        self._told: tuple[WeightsCommand, Any] | None = None
        self._ending = False

    def start(self, on_event: EventSink) -> None:
        launch, world = self._config.launch, self._config.layout.world
        self._roll = RollCall(world, on_event)
        cpus = sum(bundle.get("CPU", 0.0) for bundle in self._bundles)
        self._cluster = Cluster(launch.address, num_cpus=math.ceil(cpus))
        self._cluster.open(launch.connect_timeout_s)
        if ray.cluster_resources().get(RANK_RESOURCE):
            for bundle in self._bundles[:world]:
                bundle[RANK_RESOURCE] = 1.0
        self._place(launch.connect_timeout_s)
        self._actors = [self._rank_actor(rank) for rank in range(world)]
        deadline = time.monotonic() + launch.load_timeout_s
        self._pids = self._each("hello", deadline)
        host = self._address_of_rank_0()
        port = self._ask(0, "listen", deadline, host, world)
        for rank, seat in enumerate(self._seats):
            if self._is_here(seat):
                self._wires[rank] = self._wire(rank, deadline)
        job = self._config.model_dump_json(), str(self._folder), host, port
        self._each("start", deadline, *job)
        for rank in range(world):
            reader = threading.Thread(
                target=self._read, args=(rank,), name=f"interlace rank {rank} events", daemon=True
            )
            reader.start()
            self._readers.append(reader)
        # A rank that is stuck is found by the others within the deadline, with a reason.
        self._roll.await_ready(launch.connect_timeout_s + launch.load_timeout_s + _GRACE_S)

    def send(self, leader: int, command: Command) -> None:
        if self._ending:
            return
        rank = self._config.layout.leader(leader)
        if rank in self._wires:
            self._wires[rank].send(encode(command))
        else:
            post = self._actors[rank].post.options(concurrency_group="commands")
            post.remote([encode(command)])

    def tell(self, rank: int, command: WeightsCommand) -> None:
        if self._ending:
            return
        if self._told is None or self._told[0] is not command:
            # Once for all ranks of a node, which then look into the same memory.
            self._told = command, ray.put(np.frombuffer(encode(command), dtype=np.uint8))
        post = self._actors[rank].post_weights.options(concurrency_group="commands")
        post.remote(self._told[1])

    def stop(self) -> None:
        launch = self._config.launch
        try:
            for leader in range(self.num_leaders):
                self.send(leader, Stop())
            self._roll.await_ended(launch.ticket_timeout_s + _GRACE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        if self._ending or self._cluster is None:
            return
        self._ending = True
        self._roll.close()
        if self._cluster.is_open:
            for actor in self._actors:
                ray.kill(actor)
            self._kill_stopped()
            for wire in self._wires.values():
                wire.hang_up()
            for reader in self._readers:
                reader.join(_GRACE_S)
            for wire in self._wires.values():
                wire.close()
            if self._group is not None:
                remove_placement_group(self._group)
        self._cluster.close()

    # ---- placing and starting

    def _place(self, timeout_s: float) -> None:
        self._group = placement_group(self._bundles, strategy="PACK")
        deadline = time.monotonic() + timeout_s
        while not self._group.wait(timeout_seconds=0.5):  # short waits: Ctrl-C is heard between
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the cluster has no room for this job within {timeout_s:g} s: asked for "
                    f"{_in_words(self._bundles)}; the cluster has "
                    f"{_amounts(ray.cluster_resources())}, of which available "
                    f"{_amounts(ray.available_resources())}: lower layout.world, "
                    "environments.num_processes or cpus_per_process, or give it more nodes"
                )
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self._seats = sorted(range(self._config.layout.world), key=lambda seat: str(nodes[seat]))

    def _is_here(self, bundle: int) -> bool:
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return bool(nodes[bundle] == ray.get_runtime_context().get_node_id())

    def _wire(self, rank: int, deadline: float) -> Wire:
        with contextlib.closing(Door()) as door:
            self._ask(rank, "connect", deadline, door.path)
            return Wire(door.open(_GRACE_S), patience_s=self._longest_silence_s)

    def _rank_actor(self, rank: int) -> Any:
        bundle = self._bundles[rank]
        groups = {"commands": 1, "events": 1, "life": 1}
        return (
            ray.remote(concurrency_groups=groups)(RankActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                **self._placed(self._seats[rank], self._rank_variables()),
            )
            .remote(rank)
        )

    def _placed(self, bundle: int, variables: dict[str, str]) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
            "runtime_env": {"env_vars": variables},
        }

    def _rank_variables(self) -> dict[str, str]:
        """What differs from the environment that Ray gives every process."""
        # A node of one machine may have a name that resolves to nothing.
        loopback = sys.platform == "linux" and self._cluster is not None and self._cluster.is_ours
        return _VARIABLES | _paths() | ({"GLOO_SOCKET_IFNAME": "lo"} if loopback else {})

    def _address_of_rank_0(self) -> str:
        node = placement_group_table(self._group)["bundles_to_node_id"][self._seats[0]]
        addresses = (n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        return str(next(addresses))

    def _each(self, method: str, deadline: float, *args: Any) -> list[Any]:
        """Call a method of all ranks at once. Raises LaunchError naming the rank that fails."""
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return [_answer(ref, rank, deadline) for rank, ref in enumerate(refs)]

    def _ask(self, rank: int, method: str, deadline: float, *args: Any) -> Any:
        return _answer(getattr(self._actors[rank], method).remote(*args), rank, deadline)

    def _kill_stopped(self) -> None:
        """Ray asks a process to end, which one that is stopped does not hear."""
        for pid, seat in zip(self._pids, self._seats, strict=False):
            if self._is_here(seat) and is_stopped(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def _longest_silence_s(self) -> float:
        """Of a rank. Its peers, if it has any, notice earlier and know more."""
        launch = self._config.launch
        return max(launch.ticket_timeout_s, launch.exchange_timeout_s) + 2 * _GRACE_S

    def _read(self, rank: int) -> None:
        """Deliver the events of one rank until its last word, or the end of its process."""
        longest, wire = self._longest_silence_s, self._wires.get(rank)
        life = self._actors[rank].live.options(concurrency_group="life").remote()
        take = self._actors[rank].take.options(concurrency_group="events")
        try:
            while True:
                coming = wire.receive() if wire else ray.get(take.remote(_POLL_S), timeout=longest)
                for event in map(decode_event, filter(None, coming)):
                    self._roll.take(event)
                    if isinstance(event, RankReport | RankFailure):
                        return
        except (TimeoutError, GetTimeoutError):
            self._roll.lost(rank, f"its process has not answered for {longest:g} s")
        except RayError as error:
            self._roll.lost(rank, f"its process is gone: {_one_line(error)}")
        except EOFError:
            self._roll.lost(rank, _end_of(life))

    # ---- environments

    async def _start_host(self, index: int) -> EnvironmentHost:
        """A host in the bundle of `index`, which its predecessor may only just have left."""
        world, environments = self._config.layout.world, self._config.environments
        cpus = environments.cpus_per_process
        bundle = world + index if cpus else index % world
        placed = self._placed(bundle, _VARIABLES | _paths())
        actor = ray.remote(EnvironmentActor).options(num_cpus=cpus, **placed).remote()
        host = RayEnvironmentHost(actor)
        # As an argument: the variables of an actor are shown to everybody on the cluster.
        variables = json.dumps(present(environments.pass_env))
        try:
            async with asyncio.timeout(self._config.launch.load_timeout_s):
                await host.open(variables, Door() if self._is_here(bundle) else None)
        except BaseException as error:
            host.kill()
            if not isinstance(error, RayError | TimeoutError):
                raise
            raise RuntimeError(f"environment actor {index}: {_one_line(error)}") from error
        return host


class RayEnvironmentHost:
    """An EnvironmentHost that is the SubprocessHost of an actor, wherever that lives."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._line: EnvironmentLine | None = None
        self._lifeline = asyncio.wrap_future(actor.live.remote().future())
        self._lifeline.add_done_callback(lambda life: life.cancelled() or life.exception())
        self._burial: asyncio.Task[None] | None = None

    async def open(self, variables: str, door: Door | None) -> None:
        """Have the actor start its host; `door`: where it is on this node, for calls past it."""
        if door is None:
            await self._actor.open.remote(variables)
            return
        with contextlib.closing(door):
            await self._actor.open.remote(variables, door.path)
            self._line = await EnvironmentLine.behind(door)

    async def call(self, frame: bytes) -> bytes:
        """See EnvironmentHost."""
        if self._burial is not None:
            await asyncio.shield(self._burial)
            raise HostDied("the environment process was ended", idle=True)
        idle = self._lifeline.done() or (self._line is not None and self._line.is_closed)
        try:
            reply = await self._reply(frame, idle)
        except RayError as error:
            raise HostDied(f"its actor is gone: {_one_line(error)}", idle=idle) from error
        if isinstance(reply, bytes):
            return reply
        message, idle = reply
        raise HostDied(message, idle=idle)

    async def _reply(self, frame: bytes, idle: bool) -> bytes | tuple[str, bool]:
        """As `EnvironmentActor.call` gives it."""
        if self._line is None:
            passed_on: bytes | tuple[str, bool] = await self._actor.call.remote(frame)
            return passed_on
        reply = await self._line.call(frame)
        return (await self._actor.close.remote(), idle) if reply is None else reply

    def kill(self) -> None:
        """See EnvironmentHost."""
        if self._burial is None:
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        # First the host, which takes along whatever the environments had started; then the actor.
        if not self._lifeline.done() and ray.is_initialized():
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await self._actor.close.remote()
            ray.kill(self._actor)
            await asyncio.wait([self._lifeline], timeout=_GRACE_S)
        if self._line is not None:
            self._line.close()


class Cluster:
    """The connection to Ray, and Ray itself if nobody had started it.

    A Ray that was started here ends with the thread that did it, so that gets a thread to itself.
    """

    def __init__(self, address: str | None, *, num_cpus: int) -> None:
        """Without an address a Ray of this machine's cores, or of `num_cpus` if that is more.

        A connection this process has already is used, whatever the address, and kept.
        """
        self.is_open = ray.is_initialized()
        self.is_ours = not self.is_open and address is None
        self._address, self._num_cpus = address, max(num_cpus, os.cpu_count() or 1)
        self._opened, self._closing = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def open(self, timeout_s: float) -> None:
        """Connect, within `timeout_s` if there is an address. Raises LaunchError."""
        if self.is_open:
            return
        if self._address is not None and (place := re.fullmatch(r"([\w.-]+):(\d+)", self._address)):
            try:  # Ray itself would try for many minutes
                socket.create_connection((place[1], int(place[2])), timeout_s).close()
            except OSError as error:
                raise self._failed(error) from error
        self._thread = threading.Thread(target=self._live, name="interlace ray", daemon=True)
        self._thread.start()
        if not self._opened.wait(None if self.is_ours else timeout_s):
            raise self._failed(TimeoutError(f"no connection within {timeout_s:g} s"))
        if self._error is not None:
            raise self._failed(self._error)

    def close(self) -> None:
        """Disconnect, and end what `open` started."""
        self._closing.set()
        if self._thread is not None:
            # A Ray of our own is waited for, to the end; who never answered is not.
            self._thread.join(None if self.is_ours or self.is_open else _GRACE_S)
        self.is_open = False

    def _failed(self, error: Exception) -> LaunchError:
        if self._address is None:
            where, advice = "on this machine", "interlace doctor --ray looks for the cause"
        else:
            where = f"at {self._address}"
            advice = "start one there with ray start --head, or leave launch.address unset"
            if "AuthenticationError" in f"{_one_line(error)} {error.__cause__}":
                advice = (
                    "it asks for a token: export RAY_AUTH_MODE=token, with the token of its head "
                    "in ~/.ray/auth_token or RAY_AUTH_TOKEN"
                )
        return LaunchError(
            f"no Ray cluster {where}: {_one_line(error)}; {advice}; launch.kind=local needs no Ray"
        )

    def _live(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if self.is_ours:
                    with _unreported():
                        ray.init(**self._local(stack), **_QUIETLY)
                else:
                    ray.init(self._address, **_QUIETLY)
                stack.callback(ray.shutdown)
                self.is_open = True
            except Exception as error:
                self._error = error
                ray.shutdown()
                return
            finally:
                self._opened.set()
            self._closing.wait()

    def _local(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        folder = socket_folder("ray-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return {
            "address": "local",
            "num_cpus": self._num_cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": folder,
            # Idle workers would cost seconds of every core; ours have an environment of their own.
            # And ranks are what this machine is for: they do not give way to everything else.
            "_system_config": {"prestart_worker_first_driver": False, "worker_niceness": 0},
        }


_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # The keeper of an environment ends by itself, and only after what it keeps.
    "RAY_kill_child_processes_on_worker_exit": "0",
}


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """A Ray that is started meanwhile tells its makers nothing, unless the user wants it to."""
    name = "RAY_USAGE_STATS_ENABLED"
    chosen = name in os.environ
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if not chosen:
            del os.environ[name]


def _paths() -> dict[str, str]:
    """Modules are found where this process finds them, from whichever folder it was started."""
    return {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def _bundles(config: RolloutConfig) -> list[dict[str, float]]:
    rank = {"GPU": 1.0} if config.launch.backend == "nccl" else {"CPU": 1.0}
    environments = config.environments
    bundles = [dict(rank) for _ in range(config.layout.world)]
    if environments.cpus_per_process:
        host = {"CPU": environments.cpus_per_process}
        bundles += [dict(host) for _ in range(environments.num_processes)]
    return bundles


def _in_words(bundles: Iterable[dict[str, float]]) -> str:
    counts: dict[str, int] = {}
    for bundle in bundles:
        counts[_amounts(bundle)] = counts.get(_amounts(bundle), 0) + 1
    return " and ".join(f"{count} x {amounts}" for amounts, count in counts.items())


def _amounts(resources: dict[str, float]) -> str:
    kinds = [name for name in ("CPU", "GPU", RANK_RESOURCE) if resources.get(name)]
    return ", ".join(f"{resources[name]:g} {name}" for name in kinds) or "nothing"


def _answer(ref: Any, rank: int, deadline: float) -> Any:
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except GetTimeoutError:
        raise LaunchError(f"rank {rank}: its process did not start in time") from None
    except RayError as error:
        raise LaunchError(f"rank {rank}: its process is gone: {_one_line(error)}") from error


def _end_of(life: Any) -> str:
    """Of a process that has closed its end of a wire; `life` ends with it."""
    try:
        ray.get(life, timeout=_GRACE_S)
    except GetTimeoutError:
        pass
    except RayError as error:
        return f"its process is gone: {_one_line(error)}"
    return "its process has hung up"


def _one_line(error: BaseException) -> str:
    """What happened, without Ray's identifiers and its advice for any case whatever."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    pid = re.search(r"\bpid: (\d+)", text)
    cause = re.search(r"Worker exit detail: (.*?\.)(?: Some common causes|$)", text)
    return f"pid {pid[1]}: {cause[1]}" if pid and cause else text
