"""Two hosts made of namespaces: one digest, ranks on both, and nothing left however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interlace.rollout import Rollout, load_config
from interlace.rollout.commands.job import on_one_host
from interlace.rollout.config import ConfigError
from interlace.rollout.digest import digest
from interlace.rollout.launch.across_hosts import run_across_hosts
from interlace.rollout.launch.hosts import two_hosts
from interlace.rollout.launch.interface import interface_towards
from interlace.rollout.launch.launcher import LaunchError


def hosts_can_be_made() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--net", "--pid", "--mount", "true"]).returncode == 0


in_namespaces = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not hosts_can_be_made(), reason="network namespaces need Linux and root"),
    pytest.mark.timeout(150),
]
LONG = ("sampling.max_tokens=200", "environments.max_turns=400")
RANK = {"ray": "ray::RankActor", "torchrun": "-u -m interlace.rollout.cli"}


def marked(*kinds: str) -> list[object]:
    """Launchers, as the parameters of a test."""
    return [
        pytest.param(kind, marks=[*in_namespaces, *([pytest.mark.ray] if kind == "ray" else [])])
        for kind in kinds
    ]


def inhabitants() -> dict[int, tuple[str, str]]:
    """Process id -> network namespace and command line, of all outside of ours."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            network = os.readlink(f"/proc/{entry}/ns/net")
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found[int(entry)] = network, line
    ours = os.readlink("/proc/self/ns/net")
    return {pid: seen for pid, seen in found.items() if seen[0] != ours}


def network_of_this_machine() -> str:
    show = [["ip", "-o", "link"], ["ip", "netns", "list"]]
    return "".join(subprocess.check_output(words, text=True) for words in show)


class Command:
    """`interlace rollout --hosts 2`, and the namespaces that its processes were seen in."""

    def __init__(self, kind: str, out: Path, *overrides: str) -> None:
        sets = [word for o in (f"launch.kind={kind}", *overrides) for word in ("--set", o)]
        program = sys.executable, "-m", "interlace.rollout.cli", "rollout", "--hosts", "2"
        self.output = out.with_suffix(".txt")
        self._others = {network for network, _ in inhabitants().values()}
        self.networks: set[str] = set()
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*program, "--preset", "tiny", *sets, "--out", str(out)],
                cwd=out.parent,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def look(self) -> dict[int, tuple[str, str]]:
        """What runs on its hosts now."""
        seen = {p: s for p, s in inhabitants().items() if s[0] not in self._others}
        self.networks |= {network for network, _ in seen.values()}
        return seen

    def await_sight(self, text: str, count: int = 1) -> dict[int, str]:
        """Process id -> namespace of those whose command line contains `text`."""
        while True:
            assert self.process.poll() is None, self.output.read_text()
            found = {pid: network for pid, (network, line) in self.look().items() if text in line}
            if len(found) >= count:
                return found
            time.sleep(0.05)

    def await_end(self) -> int:
        return self.process.wait(60)


@contextmanager
def command(kind: str, out: Path, *overrides: str) -> Iterator[Command]:
    """After it nothing is left: no process on its hosts, no interface, no name."""
    before = network_of_this_machine()
    running = Command(kind, out, *overrides)
    try:
        yield running
        deadline = time.monotonic() + 5
        while left := {p: s for p, s in inhabitants().items() if s[0] in running.networks}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert running.networks
        assert network_of_this_machine() == before
    finally:
        running.process.kill()
        running.process.wait()


@pytest.fixture(scope="module")
def reference() -> str:
    config = load_config(preset="tiny")
    with Rollout(config) as rollout:
        return digest(rollout.run(config.expand_tasks()))


@pytest.mark.parametrize("kind", marked("torchrun", "ray"))
def test_ranks_on_two_hosts_give_the_digest_of_one(
    kind: str, tmp_path: Path, reference: str
) -> None:
    with command(kind, tmp_path / "out") as running:
        ranks = running.await_sight(RANK[kind], count=2)
        assert len(set(ranks.values())) == 2
        assert running.await_end() == 0, running.output.read_text()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["digest"] == reference


@pytest.mark.hosts
@pytest.mark.parametrize("kind", marked("torchrun", "ray"))
def test_ctrl_c_leaves_nothing_on_either_host(kind: str, tmp_path: Path) -> None:
    with command(kind, tmp_path / "out", *LONG) as running:
        running.await_sight("interlace.envs.worker")
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        assert running.await_end() == 130, running.output.read_text()


@pytest.mark.hosts
@pytest.mark.parametrize("kind", marked("torchrun", "ray"))
def test_a_rank_killed_on_the_other_host_is_named_and_nothing_is_left(
    kind: str, tmp_path: Path
) -> None:
    with command(kind, tmp_path / "out", *LONG) as running:
        (worker,) = set(running.await_sight("interlace.envs.worker").values())
        ranks = running.await_sight(RANK[kind], count=2)
        os.kill(next(p for p, network in ranks.items() if network != worker), signal.SIGKILL)
        assert running.await_end() == 1
    assert re.search(r"rank [01] is DEAD: ", running.output.read_text())


@pytest.mark.parametrize("kind", marked("torchrun"))
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.hosts), signal.SIGTERM, signal.SIGKILL],
)
def test_a_command_that_is_ended_from_outside_leaves_nothing(
    kind: str, number: signal.Signals, tmp_path: Path
) -> None:
    with command(kind, tmp_path / "out", *LONG) as running:
        running.await_sight("torch.distributed.run", count=2)
        running.process.send_signal(number)
        assert running.await_end() == (-number if number is signal.SIGKILL else 130)


@pytest.mark.parametrize("kind", marked("torchrun"))
def test_ctrl_c_between_the_start_of_a_program_and_its_return_leaves_no_host_waiting(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class InterruptedPopen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__(command, **options)  # type: ignore[call-overload]
            if command[0] == "sleep":
                started.append(self)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
    with pytest.raises(KeyboardInterrupt), two_hosts() as hosts:
        hosts[0].start(["sleep", "600"])
    assert [program.poll() for program in started] == [-signal.SIGKILL]


@pytest.mark.parametrize("kind", marked("torchrun"))
def test_a_folder_that_cannot_be_used_is_one_error_before_anything_starts(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    running = Command(kind, tmp_path / "out")
    assert running.await_end() == 2
    (error,) = running.output.read_text().splitlines()
    assert "holds thesis.tex" in error


@pytest.mark.parametrize("kind", marked("torchrun"))
def test_hosts_share_a_cable_and_neither_memory_nor_processes(kind: str, tmp_path: Path) -> None:
    server = "import socket; s = socket.create_server(('10.77.0.1', 7)); print(s.accept()[1][0])"
    client = (
        "import os, pathlib, socket, time\n"
        "for _ in range(100):\n"
        "    try: socket.create_connection(('interlace-0', 7)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "print(socket.gethostname(), os.getpid() < 9, os.listdir('/dev/shm'))"
    )
    with two_hosts() as hosts:
        files = [(tmp_path / name).open("w+b") for name in "ab"]
        sources = zip(hosts, (server, client), files, strict=True)
        for program in [h.start([sys.executable, "-c", s], output=f) for h, s, f in sources]:
            assert program.wait(20) == 0
        said = []
        for file in files:
            with file:
                file.seek(0)
                said.append(file.read().decode().strip())
        assert said == ["10.77.0.2", "interlace-1 True []"]
        with pytest.raises(LaunchError, match=r"interlace-0: ip link add .*exists"):
            hosts[0].ip("link", "add", "eth0", "type", "dummy")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), r"launch\.kind is local: add --set launch\.kind=ray"),
        (("launch.kind=ray", "layout.world=3"), r"layout\.world is 3: make it even"),
        (("launch.kind=ray", "launch.address=a:1"), r"launch\.address is a:1: leave one out"),
        (("launch.kind=torchrun", "launch.backend=nccl"), r"launch\.backend is nccl"),
    ],
)
def test_a_job_that_two_hosts_cannot_share_is_refused(
    overrides: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_across_hosts(load_config(preset="tiny", overrides=overrides), [], pytest.fail)


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "they need root: run it with"),
        (
            lambda patch: (patch.setattr(os, "geteuid", int), patch.setenv("PATH", "")),
            "apt-get install iproute2",
        ),
    ],
)
def test_a_machine_that_cannot_make_hosts_says_what_to_do(
    spoil: Callable[[pytest.MonkeyPatch], object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    with pytest.raises(ConfigError, match=reason), two_hosts():
        pass


def test_the_option_is_taken_out_of_the_command_line() -> None:
    given = ["rollout", "--hosts", "2", "--preset", "tiny", "--hosts=2", "--out", "x"]
    assert on_one_host(given) == ["rollout", "--preset", "tiny", "--out", "x"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the choice is left to gloo")
def test_the_interface_towards_this_machine_is_the_one_with_its_address() -> None:
    assert interface_towards("127.0.0.1", 1) == "lo"
    assert interface_towards("no such name.invalid", 1) is None
