"""Real processes: the distributed tests, and what one rank sees over gloo when the other fails."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.comm.gloo_rank import TIMEOUT_S

from interlace.comm.windows import native

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SLACK_S = 5.0
"""Of a busy machine."""
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    "PYTHONPATH": str(ROOT / ".src"),
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("transport", "num_ranks", "tests"),
    [
        ("window", 2, "test_torch_communicator.py test_toy_over_process_groups.py"),
        ("window", 4, "test_rollout.py"),
        ("window", 2, "test_updates.py"),
        ("gloo", 2, "test_torch_communicator.py"),
    ],
)
def test_the_distributed_tests_pass(transport: str, num_ranks: int, tests: str) -> None:
    if transport == "window" and native() is None:
        pytest.skip("the window was built without a compiler")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", "pytest"]
    command += [f"tests/distributed/{name}" for name in tests.split(" ")]
    command += ["--backend", "gloo", "--transport", transport, "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout


@contextmanager
def two_ranks(fault: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = []
    try:
        for rank in (0, 1):
            command = [sys.executable, "tests/comm/gloo_rank.py"]
            command += [fault, str(rank), str(folder / "rendezvous")]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=ENVIRONMENT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def outcome_of_rank_0(fault: str, folder: Path) -> tuple[str, float, str]:
    with two_ranks(fault, folder) as (zero, _):
        out, err = zero.communicate(timeout=50)
        assert zero.returncode == 70, out + err
        name, seconds, message = out.split("|", 2)
        return name, float(seconds), message


def test_a_rank_that_is_killed_is_an_error_of_the_other_long_before_the_deadline(
    tmp_path: Path,
) -> None:
    name, seconds, message = outcome_of_rank_0("die", tmp_path)
    assert name == "PeerLostError"
    assert seconds < TIMEOUT_S + SLACK_S
    assert message.startswith("the transport gave up: rank 0: decode/ep broken: ")


def test_a_rank_that_never_posts_is_an_error_of_the_other_at_the_deadline(tmp_path: Path) -> None:
    name, seconds, message = outcome_of_rank_0("absent", tmp_path)
    assert name == "CollectiveTimeoutError"
    assert TIMEOUT_S <= seconds < TIMEOUT_S + SLACK_S
    assert message.startswith("no answer within 1 s: rank 0: decode/ep broken; ")
