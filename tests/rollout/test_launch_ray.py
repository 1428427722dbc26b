"""Ranks and environments as Ray actors: the same numbers, no hang, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tests.rollout.straight import beside, straight_passes

from interlace.comm.windows import native
from interlace.moe import kernels
from interlace.rollout import EndReason, Rollout, RolloutConfig, load_config
from interlace.rollout.digest import digest
from interlace.rollout.launch.launcher import LaunchError
from interlace.rollout.launch.ray import Cluster
from interlace.rollout.run import Run
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.turns import RolloutError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are followed through /proc"),
]

NUM_CPUS = 3
LONG = ("sampling.max_tokens=48", "environments.max_turns=12", "environments.num_processes=2")


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


def played(config: RolloutConfig) -> list[Trajectory]:
    with Rollout(config) as rollout:
        return list(rollout.run(config.expand_tasks()))


@pytest.fixture(scope="module")
def reference() -> str:
    return digest(played(tiny("layout.world=1", "mode=serial")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray this process is connected to before any rollout; rollouts leave it running."""
    cluster = Cluster(None, num_cpus=NUM_CPUS)
    cluster.open(30.0)
    yield cluster
    cluster.close()


def descendants(root: int) -> dict[int, str]:
    """Process id -> command line of everything below `root` that has not ended."""
    parents, names = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if state != "Z":
            parents[int(entry)] = int(parent)
            names[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    below, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    return {pid: names[pid] for pid in sorted(below - {root})}


def those_with(text: str, root: int) -> list[int]:
    return [pid for pid, line in descendants(root).items() if text in line]


def assert_ended(pids: dict[int, str], within_s: float = 5.0) -> None:
    """None of the processes seen before is there any more, whoever its parent is now."""
    deadline = time.monotonic() + within_s
    while left := [f"{pid} {line}" for pid, line in pids.items() if _runs(pid, line)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def _runs(pid: int, line: str) -> bool:
    try:
        now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return False
    return now == line


def assert_ours_have_ended(within_s: float = 5.0) -> None:
    """Of our own actors and environments; Ray's own processes stay."""
    ours = ("Actor", "interlace.envs")
    lines = descendants(os.getpid()).items()
    assert_ended({pid: line for pid, line in lines if any(o in line for o in ours)}, within_s)


def kill_once_seen(text: str) -> int:
    for _ in range(200):
        if pids := those_with(text, os.getpid()):
            os.kill(pids[0], signal.SIGKILL)
            return pids[0]
        time.sleep(0.05)
    raise AssertionError(f"no process {text}")


@pytest.mark.skipif(native() is None, reason="without windows nobody is told")
def test_a_turn_for_one_rank_wakes_those_that_sleep_beside_it(cluster: Cluster) -> None:
    """Without that each turn that finds nobody at work would wait for the others' sleep."""
    asleep = tiny(
        "launch.kind=ray",
        "layout.world=2",
        "scheduler.park_ms=600000",
        "launch.exchange_timeout_s=20",
    )
    tasks = asleep.expand_tasks()[:2]
    found = []
    for config in (asleep, tiny("layout.world=1", "mode=serial")):
        with Rollout(config) as rollout:
            # One at a time: the other rank has nothing of its own to do.
            found.append([digest(list(rollout.run([task]))) for task in tasks])
    assert found[0] == found[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mode", "transport"), [("serial", "gloo"), ("serial", "auto"), ("multiplexed", "auto")]
)
def test_one_digest_over_ray(cluster: Cluster, mode: str, transport: str, reference: str) -> None:
    config = tiny("launch.kind=ray", f"mode={mode}", f"launch.transport={transport}")
    with Rollout(config) as rollout:
        assert digest(list(rollout.run(config.expand_tasks()))) == reference
    on_window = transport == "auto" and native() is not None
    assert rollout.transport["kind"] == ("window" if on_window else "gloo")
    for _, tickets in rollout.records.values():
        passes = straight_passes(tickets)
        assert any(passes["decode"]) == (on_window and kernels.instructions() != "")
        if mode == "serial":
            assert len({*passes["decode"], *passes["prefill"]}) == 1
        else:  # some are beside a prefill
            assert not all(passes["decode"])
            together = beside(tickets)
            assert together
            by_turns = all(one == ["decode", "prefill"] * (len(one) // 2) for one in together)
            assert by_turns == (on_window and kernels.instructions() != "")
    assert ray.is_initialized()
    assert_ours_have_ended()


@pytest.mark.timeout(120)
def test_a_job_without_room_fails_in_time_and_says_what_it_asked_for(cluster: Cluster) -> None:
    config = tiny("launch.kind=ray", "layout.world=5", "launch.connect_timeout_s=2.0")
    began = time.monotonic()
    with pytest.raises(LaunchError) as raised, Rollout(config):
        pass
    assert time.monotonic() - began < 10
    assert "asked for 5 x 1 CPU and 1 x 0.25 CPU; the cluster has" in str(raised.value)
    assert "of which available" in str(raised.value)


def test_an_address_where_nobody_answers_is_one_clear_error() -> None:
    cluster = Cluster("127.0.0.1:9", num_cpus=1)
    cluster.is_open = False  # whatever this process is connected to
    with pytest.raises(LaunchError, match=r"no Ray cluster at 127\.0\.0\.1:9: ConnectionRefused"):
        cluster.open(5.0)


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_and_nothing_is_left(cluster: Cluster) -> None:
    config = tiny("launch.kind=ray", *LONG)
    killed: list[tuple[int, float]] = []

    def broken() -> None:
        with Rollout(config) as rollout:
            for _ in rollout.run(config.expand_tasks() * 40):
                if not killed:
                    killed.append((kill_once_seen("ray::RankActor"), time.monotonic()))

    with pytest.raises(RolloutError, match=r"rank [01] is DEAD: its process (\d+)") as raised:
        broken()
    pid, at = killed[0]
    assert f"DEAD: its process {pid} has ended" in str(raised.value)
    assert time.monotonic() - at < 15
    assert_ours_have_ended()


@pytest.mark.timeout(180)
def test_what_was_in_play_when_a_rank_was_killed_goes_on_in_another_rollout(
    cluster: Cluster,
) -> None:
    turns = ("sampling.max_tokens=12", "environments.max_turns=8")
    config = tiny("launch.kind=ray", *turns)
    tasks = config.expand_tasks() * 4
    with Rollout(tiny(*turns)) as rollout:
        reference = digest(list(rollout.run(tasks)))
    given: list[Trajectory] = []
    runs: list[Run] = []

    def broken() -> None:
        with Rollout(config) as rollout:
            runs.append(rollout.run(tasks))
            for trajectory in runs[0]:
                if not given:
                    kill_once_seen("ray::RankActor")
                given.append(trajectory)

    with pytest.raises(RolloutError, match="is DEAD"):
        broken()
    left = runs[0].partials
    assert left
    with Rollout(config) as rollout:
        given += rollout.run(resume=left)
    assert digest(given) == reference
    assert_ours_have_ended()


@pytest.mark.timeout(120)
def test_environments_whose_process_is_killed_are_replayed(cluster: Cluster) -> None:
    local, over_ray = tiny(*LONG), tiny("launch.kind=ray", *LONG)
    expected = {t.trajectory_id: t.token_ids.tolist() for t in played(local)}
    trajectories = []
    with Rollout(over_ray) as rollout:
        run = iter(rollout.run(over_ray.expand_tasks()))
        kill_once_seen("interlace.envs.worker")
        kill_once_seen("ray::EnvironmentActor")
        trajectories = list(run)
    assert len(trajectories) == len(expected)
    # a request that was in flight is to blame, and there were two processes
    whole = [t for t in trajectories if t.end_reason is not EndReason.ENVIRONMENT_ERROR]
    assert len(whole) >= len(expected) - 2
    for trajectory in whole:
        assert trajectory.token_ids.tolist() == expected[trajectory.trajectory_id]
    assert_ours_have_ended()


def command(out: Path, *overrides: str) -> subprocess.Popen[str]:
    """`interlace rollout` over a Ray of its own, in another folder and a session of its own."""
    sets = [word for o in ("launch.kind=ray", *overrides) for word in ("--set", o)]
    program = sys.executable, "-m", "interlace.rollout.cli", "rollout"
    return subprocess.Popen(
        [*program, "--preset", "tiny", *sets, "--out", str(out)],
        cwd=out.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(120)
def test_the_command_starts_and_ends_a_ray_of_its_own(tmp_path: Path, reference: str) -> None:
    process = command(tmp_path / "out")
    seen: dict[int, str] = {}
    while process.poll() is None:
        seen |= descendants(process.pid)
        time.sleep(0.2)
    assert process.stdout is not None
    with process.stdout as output:
        assert process.returncode == 0, output.read()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["digest"] == reference
    assert any("raylet" in line for line in seen.values())
    assert_ended(seen)


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = command(tmp_path / "out", "sampling.max_tokens=200", "environments.max_turns=400")
    while not those_with("interlace.envs.worker", process.pid):
        assert process.poll() is None
        time.sleep(0.1)
    seen = descendants(process.pid)
    assert any("ray::RankActor" in line for line in seen.values())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert_ended(seen)
