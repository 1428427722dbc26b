"""Real jobs in which one rank fails, in every way: one error, in time, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.rollout.test_launch_ray import assert_ended, descendants, those_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are followed through /proc"),
]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 2.0
SLACK_S = 8.0
"""Of a busy machine; alone it is half a second."""
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
LONG = ("sampling.max_tokens=48", "environments.max_turns=12", "tasks.0.count=200")


def until(true: object, process: subprocess.Popen[bytes], log: Path) -> None:
    assert callable(true)
    while not true():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.01)


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": f"{ROOT / '.src'}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def command_line(kind: str, world: int, out: Path, *overrides: str) -> list[str]:
    values = (
        f"launch.kind={kind}",
        f"layout.world={world}",
        f"launch.ticket_timeout_s={DEADLINE_S}",
        f"launch.exchange_timeout_s={DEADLINE_S}",
        *LONG,
        *overrides,
    )
    sets = [word for value in values for word in ("--set", value)]
    return ["rollout", "--preset", "tiny", *sets, "--out", str(out)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended."""

    said: dict[int, tuple[float, str]]
    """Rank -> seconds after the fault and text of its last word, of those that had one."""
    verdicts: list[str]
    whats: list[str]
    files: list[str]
    log: str

    @property
    def told(self) -> str:
        """All of it. pytest cuts whatever is asserted with and is no text."""
        said = [f"rank {rank}, after {s:.2f} s: {text}" for rank, (s, text) in self.said.items()]
        ranks = zip(self.verdicts, self.whats, strict=True)
        found = [f"rank {rank} is {verdict}: {what}" for rank, (verdict, what) in enumerate(ranks)]
        last = ["last words", *said, "diagnosis", *found, "files", *self.files, "log", self.log]
        return "\n".join(last)


def failed(fault: str, folder: Path, *overrides: str, world: int = 2, rank: int = 1) -> Outcome:
    """A job under torchrun, one of whose ranks fails while all are at work."""
    notes, out = folder / "notes", folder / "out"
    notes.mkdir()
    program = [str(ROOT / "tests/rollout/failing_job.py"), fault, str(rank), str(notes)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), *program]
    command += command_line("torchrun", world, out, *overrides)
    with started(command, folder) as process:
        until((notes / "fault").exists, process, folder / "log")
        seen = descendants(process.pid)
        at = float((notes / "fault").read_text())
        if fault in SIGNALS:
            at = time.monotonic()
            os.kill(int((notes / f"pid-{rank}").read_text()), SIGNALS[fault])
        assert process.wait(60) not in (0, None), (folder / "log").read_text()
        assert_ended(seen)
    said = {}
    for file in notes.glob("said-*"):
        word = json.loads(file.read_text())
        said[int(file.name.removeprefix("said-"))] = word["at"] - at, word["text"]
    diagnosis = out / "failure" / "diagnosis.json"
    assert diagnosis.exists(), (folder / "log").read_text()
    found = json.loads(diagnosis.read_text())
    return Outcome(
        said=said,
        verdicts=[one["verdict"] for one in found["ranks"]],
        whats=[one["what"] for one in found["ranks"]],
        files=sorted(os.listdir(out / "failure")),
        log=(folder / "log").read_text(),
    )


AT_ONCE = ("kill", "raise", "other")
VERDICTS = {
    "stop": ("BLOCKED", "(process stopped, state T)"),
    "kill": ("DEAD", "has ended without a last word"),
    "raise": ("RAISED", "ValueError: a shape that does not fit"),
    "gil": ("BLOCKED", "a C call holds the interpreter"),
    "sleep": ("BLOCKED", "at fail (failing_job.py:"),
    "loop": ("BLOCKED", "at spin (failing_job.py:"),
    "other": ("DIVERGED", "elsewhere: the forward pass asks for"),
}
SPEECHLESS = ("stop", "kill", "gil")


def assert_told(fault: str, outcome: Outcome, *, world: int = 2, rank: int = 1) -> None:
    """Everything that must be true of any failure."""
    verdict, words = VERDICTS[fault]
    told = outcome.told
    assert outcome.verdicts[rank] == verdict, told
    assert words in outcome.whats[rank], told
    others = [seen for number, seen in enumerate(outcome.verdicts) if number != rank]
    assert set(others) <= {"WAITING", "RUNNING"}, told
    responsive = [r for r in range(world) if r != rank or fault not in SPEECHLESS]
    assert sorted(outcome.said) == responsive, told
    texts = {text for _, text in outcome.said.values()}
    assert len(texts) == 1, told
    (text,) = texts
    assert f"rank {rank} is {verdict}: " in text, told
    assert "Last tickets: " in text, told
    earliest = 0.0 if fault in AT_ONCE else DEADLINE_S - 0.1
    for seconds, _ in outcome.said.values():
        assert earliest <= seconds < (DEADLINE_S if earliest else 0.0) + 0.5 + SLACK_S, told
    files = ["diagnosis.json", *(f"rank-{r}.json" for r in range(world))]
    assert outcome.files == files, told
    assert text in outcome.log, told
    assert "what every rank was doing" in outcome.log, told


@pytest.mark.parametrize("fault", ["stop", "kill", "raise"])
def test_a_failure_of_one_rank_is_one_error_on_all(fault: str, tmp_path: Path) -> None:
    assert_told(fault, failed(fault, tmp_path))


def test_rank_0_is_told_about_by_the_next(tmp_path: Path) -> None:
    """A C call that holds the interpreter: the rank cannot even say that it is stuck."""
    assert_told("gil", failed("gil", tmp_path, rank=0), rank=0)


@pytest.mark.failures
@pytest.mark.parametrize("fault", ["stop", "kill"])
@pytest.mark.parametrize(("where", "mode"), [("crossing", "serial"), ("abreast", "multiplexed")])
def test_a_rank_that_ends_inside_a_straight_pass_is_named_with_the_message(
    where: str, mode: str, fault: str, tmp_path: Path
) -> None:
    outcome = failed(f"{where}-{fault}", tmp_path, f"mode={mode}")
    assert_told(fault, outcome)
    (text,) = {text for _, text in outcome.said.values()}
    awaited = r"^epoch 0 step \d+ seq \d+ (decode|prefill)/ep \d+\.(counts|dispatch|combine): "
    assert re.match(awaited + "rank 1 is ", text), outcome.told


@pytest.mark.failures
@pytest.mark.parametrize("fault", ["gil", "sleep", "loop", "other"])
@pytest.mark.parametrize("transport", ["window", "gloo"])
def test_every_other_kind_of_failure(fault: str, transport: str, tmp_path: Path) -> None:
    assert_told(fault, failed(fault, tmp_path, f"launch.transport={transport}"))


@pytest.mark.failures
@pytest.mark.parametrize("fault", ["stop", "kill", "raise"])
def test_failures_over_gloo(fault: str, tmp_path: Path) -> None:
    assert_told(fault, failed(fault, tmp_path, "launch.transport=gloo"))


@pytest.mark.failures
@pytest.mark.parametrize("fault", sorted(VERDICTS))
def test_failures_of_one_of_four_ranks(fault: str, tmp_path: Path) -> None:
    outcome = failed(fault, tmp_path, "layout.tp=2", world=4, rank=2)
    assert_told(fault, outcome, world=4, rank=2)


@pytest.mark.failures
@pytest.mark.parametrize("fault", ["stop", "kill", "raise", "sleep"])
def test_failures_of_rank_0(fault: str, tmp_path: Path) -> None:
    assert_told(fault, failed(fault, tmp_path, rank=0), rank=0)


@pytest.mark.failures
def test_a_rank_that_does_not_finish_loading_is_found_by_the_deadline_of_loading(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    program = [str(ROOT / "tests/rollout/failing_job.py"), "loading", "1", str(notes)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *program]
    command += command_line("torchrun", 2, tmp_path / "out", "launch.load_timeout_s=6")
    with started(command, tmp_path) as process:
        assert process.wait(100) not in (0, None), (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "every rank makes the communicators: rank 1 is BLOCKED: has not come to it" in log
    assert "before its first ticket" in log
    assert (tmp_path / "out" / "failure" / "rank-1.json").exists()


@pytest.mark.ray
@pytest.mark.failures
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_failure_over_ray(fault: str, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-m", "interlace.rollout.cli"]
    short = "sampling.max_tokens=8", "environments.max_turns=3"
    with started([*command, *command_line("ray", 2, out, *short)], tmp_path) as process:
        metrics = out / "metrics.jsonl"

        def at_work() -> bool:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return any(json.loads(line).get("trajectories", 0) >= 2 for line in lines)

        until(at_work, process, log)
        seen = descendants(process.pid)
        victim = those_with("ray::RankActor", process.pid)[0]
        at = time.monotonic()
        os.kill(victim, SIGNALS[fault])
        until(lambda: "error: " in log.read_text(), process, log)
        assert time.monotonic() - at < DEADLINE_S + 0.5 + 2 * SLACK_S
        assert process.wait(60) == 1, log.read_text()
        assert_ended(seen)
    assert f" is {VERDICTS[fault][0]}: " in log.read_text()
    found = json.loads((out / "failure" / "diagnosis.json").read_text())
    (cause,) = [rank for rank in found["ranks"] if rank["verdict"] == VERDICTS[fault][0]]
    assert cause["pid"] == victim
    last = json.loads((out / "failure" / f"rank-{cause['rank']}.json").read_text())["tickets"]
    assert len(last) > 8
    assert {ticket["reached"] for ticket in last} <= {"computing", "posted", "settled"}
