"""One job on two hosts of its own: torchrun's agents, or the nodes of a Ray cluster."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from interlace.rollout.config import ConfigError, RolloutConfig

from .hosts import Host, two_hosts
from .launcher import LaunchError

Programs = Sequence[subprocess.Popen[bytes]]

RANK_RESOURCE = "interlace_rank"
"""What a Ray node offers to say how many ranks it takes."""

_STORE_PORT, _RAY_PORT = 29400, 6379
_GRACE_S = 20.0
_PROGRAM = "interlace.rollout.cli"
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # their network leads nowhere else
    "RAY_NUM_REDIS_GET_RETRIES": "120",  # so long, in seconds, a node tries to reach the head
}
_OBJECT_STORE_BYTES = 128 * 1024**2


def run_across_hosts(
    config: RolloutConfig, arguments: Sequence[str], prepare: Callable[[], None]
) -> int:
    """Run the command line `arguments` of this program with its ranks on two hosts; its exit code.

    `prepare` is called before, but not where hosts cannot be made; what it raises is raised.
    Ctrl-C and SIGTERM reach it as Ctrl-C. Whatever happens, nothing is left running. Raises
    ConfigError for a job or a machine this cannot be done with.
    """
    _check(config)
    with _terminated_like_ctrl_c(), two_hosts() as hosts:
        prepare()
        if config.launch.kind == "torchrun":
            programs = _torchrun(config, hosts, arguments)
        else:
            programs = _over_ray(config, hosts, arguments)
        try:
            return _outcome(programs)
        except BaseException:
            _interrupt(programs)
            raise


def _check(config: RolloutConfig) -> None:
    launch, world = config.launch, config.layout.world
    if launch.kind == "local":
        raise ConfigError(
            "--hosts 2 needs ranks that are processes, launch.kind is local: "
            "add --set launch.kind=ray, or torchrun"
        )
    if launch.address is not None:
        raise ConfigError(
            f"--hosts 2 starts a Ray of its own, launch.address is {launch.address}: leave one out"
        )
    if launch.backend != "gloo":
        raise ConfigError(f"--hosts 2 is for gloo, launch.backend is {launch.backend}")
    if world % 2:
        raise ConfigError(
            f"--hosts 2 puts half of the ranks on each host, layout.world is {world}: make it even"
        )


def _torchrun(
    config: RolloutConfig, hosts: tuple[Host, Host], arguments: Sequence[str]
) -> Programs:
    return [
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", str(config.layout.world // 2)),
                *("--master-addr", hosts[0].address, "--master-port", str(_STORE_PORT)),
                *("-m", _PROGRAM, *arguments),
            ],
            variables=_VARIABLES,
        )
        for number, host in enumerate(hosts)
    ]


def _over_ray(
    config: RolloutConfig, hosts: tuple[Host, Host], arguments: Sequence[str]
) -> Programs:
    address = f"{hosts[0].address}:{_RAY_PORT}"
    head = (
        *("--head", "--port", str(_RAY_PORT), "--include-dashboard", "false"),
        *("--system-config", json.dumps({"prestart_worker_first_driver": False})),
        # A host's shared memory is its own, and goes with it: so does what Ray writes.
        *("--temp-dir", "/dev/shm/ray"),
    )
    deadline = time.monotonic() + config.launch.load_timeout_s
    # Not pipes: what `ray start` leaves running would keep them open.
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        nodes = [
            _start_ray(config, hosts[0], first, *head),
            _start_ray(config, hosts[1], second, "--address", address),
        ]
        for host, node, output in zip(hosts, nodes, (first, second), strict=True):
            _await_ray(host, node, output, deadline)
    program = [sys.executable, "-m", _PROGRAM, *arguments, "--set", f"launch.address={address}"]
    return [hosts[0].start(program, variables=_VARIABLES)]


def _start_ray(
    config: RolloutConfig, host: Host, output: IO[bytes], *arguments: str
) -> subprocess.Popen[bytes]:
    """A program that ends once its node runs and is part of the cluster."""
    environments, ranks = config.environments, config.layout.world // 2
    # Environments may be anywhere, ranks may not.
    cpus = ranks + math.ceil(environments.num_processes * environments.cpus_per_process)
    return host.start(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments),
            *("--node-ip-address", host.address, "--num-cpus", str(cpus)),
            *("--resources", json.dumps({RANK_RESOURCE: ranks})),
            *("--object-store-memory", str(_OBJECT_STORE_BYTES)),
        ],
        variables=_VARIABLES,
        output=output,
    )


def _await_ray(
    host: Host, node: subprocess.Popen[bytes], output: IO[bytes], deadline: float
) -> None:
    """Raises LaunchError with what Ray said if the node does not run by then."""
    with suppress(subprocess.TimeoutExpired):
        node.wait(max(0.0, deadline - time.monotonic()))
    if (code := node.poll()) != 0:
        output.seek(0)
        said = " ".join(output.read().decode(errors="replace").split())[-1000:]
        what = "did not end in time" if code is None else f"ended with exit code {code}"
        raise LaunchError(f"{host.name}: ray start {what}: {said}")


def _outcome(programs: Programs) -> int:
    """The exit code of the first; LaunchError if another fails and the first goes on."""
    first, *others = programs
    while (code := first.poll()) is None:
        failed = next((program for program in others if program.poll()), None)
        if failed is not None:
            try:
                return first.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"the second host's program has ended with exit code {failed.returncode}"
                ) from None
        time.sleep(0.05)
    _await_all(others)
    return code


def _interrupt(programs: Programs) -> None:
    """As Ctrl-C would; those that are not gone soon end with their host."""
    for program in programs:
        program.send_signal(signal.SIGINT)
    _await_all(programs)


def _await_all(programs: Programs) -> None:
    deadline = time.monotonic() + _GRACE_S
    for program in programs:
        with suppress(subprocess.TimeoutExpired):
            program.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
