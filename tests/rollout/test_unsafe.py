"""Every rule broken on purpose in a real rollout: what is seen, and that it is right without."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.comm.errors import DivergedError
from interlace.comm.sequencer import Sequencer
from interlace.comm.testing import LocalWorld
from interlace.comm.unsafe import unsafe_sequencer
from interlace.moe.model import Model
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout import Rollout, RolloutConfig, Task, load_config
from interlace.rollout.cache import model_folder
from interlace.rollout.cli import app
from interlace.rollout.config import ConfigError
from interlace.rollout.group import Leader
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import SLOTS, compose
from interlace.rollout.launch.local import LocalTransport, _concat, _copy, _split
from interlace.rollout.launch.unsafe_communicators import unsafe_communicators
from interlace.rollout.messages import Event, Stop, TurnRequest, TurnResult
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.unsafe import unsafe_leader, unsafe_model
from interlace.rollout.unsafe_outcome import Outcome, outcome_of, safe_digests

TASKS = [
    *(Task(prompt=f"prompt number {n}", max_tokens=8) for n in range(3)),
    *(Task(prompt=f"a longer prompt, the one with number {n}", max_tokens=3) for n in range(4)),
]
TP = ("layout.world=4", "layout.tp=2")
STRICT = ("launch.serial_device_slots=1",)
HANG, DIVERGED, CRASH = Outcome.HANG_DIAGNOSED, Outcome.DIVERGENCE_DETECTED, Outcome.CRASH
WRONG, UNSEEN = Outcome.WRONG_TOKENS, Outcome.UNSEEN


def local(*overrides: str) -> RolloutConfig:
    small = ("tasks=[]", "layout.world=2", "scheduler.chunk_tokens=24")
    return load_config(preset="tiny", overrides=[*small, *overrides])


def unsafe(arms: str, without: str = "") -> tuple[str, ...]:
    return f"unsafe.arms={arms.split()}", f"unsafe.without={without.split()}"


def played(
    config: RolloutConfig, tasks: Sequence[Task] = TASKS
) -> tuple[list[Trajectory], Exception | None]:
    delivered: list[Trajectory] = []
    try:
        with Rollout(config) as rollout:
            delivered.extend(rollout.run(tasks))
            assert rollout.exact is not bool(config.unsafe.arms)
    except Exception as error:
        return delivered, error
    return delivered, None


@pytest.fixture(scope="module")
def safe() -> dict[int, str]:
    digests = safe_digests(local(), TASKS)
    assert digests is not None
    return digests


# ---- what is seen


@pytest.mark.slow
@pytest.mark.parametrize("ways", [(), STRICT, TP], ids=["2", "2 strict", "2x2"])
def test_without_arms_the_same_runs_are_right(ways: tuple[str, ...], safe: dict[int, str]) -> None:
    assert outcome_of(*played(local(*ways)), safe) is UNSEEN


SEEN = [
    ("one_window", "", (), DIVERGED, r"waits for .*decode/ep .* holds .*prefill/ep"),
    ("one_window", "L2", (), CRASH, ""),
    ("one_group", "", (), UNSEEN, ""),
    ("one_group free_order", "", (), DIVERGED, r"waits for .*/ep .* holds .*/ep"),
    ("free_order", "", STRICT, HANG, r"nothing can move\. Waiting: rank 0: .*; rank 1: "),
    ("idle_skips", "", (), HANG, r"nothing can move\. Waiting: rank 0: .*; rank 1: "),
    ("one_slot", "", (), DIVERGED, r"waits for count (\d+) .* holds count (?!\1)\d+"),
    ("one_slot", "L2", (), CRASH, ""),
    ("slot_per_path", "", TP, DIVERGED, r"waits for count (\d+) .* holds count (?!\1)\d+"),
    ("communicator_hashes", "", (), UNSEEN, ""),
    ("swap", "", (), DIVERGED, "the tickets issued on decode/ep differ"),
    ("swap", "", STRICT, HANG, "nothing can move"),
    ("swap communicator_hashes", "", (), UNSEEN, ""),
    ("early_return", "", (), DIVERGED, "OrderError: .* the forward pass already returned"),
    ("early_return", "L0", (), HANG, "nothing can move"),
    ("early_commit", "", (), UNSEEN, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arms", "without", "ways", "expected", "said"),
    SEEN,
    ids=[f"{arms} -{without} {len(ways)}" for arms, without, ways, *_ in SEEN],
)
def test_a_broken_rule_is_seen_as_expected(
    arms: str,
    without: str,
    ways: tuple[str, ...],
    expected: Outcome,
    said: str,
    safe: dict[int, str],
) -> None:
    delivered, error = played(local(*unsafe(arms, without), *ways))
    assert outcome_of(delivered, error, safe) is expected, error
    if said:
        assert error is not None
        assert_matches(said, str(error))
    assert not any(trajectory.exact for trajectory in delivered)
    assert {trajectory.info["unsafe"].split(",")[0] for trajectory in delivered} <= {
        arms.split()[0]
    }


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){pattern}"):
        raise AssertionError(text)


@pytest.mark.slow
def test_ranks_that_order_freely_are_named_unless_they_wait_for_one_another_before(
    safe: dict[int, str],
) -> None:
    delivered, error = played(local(*unsafe("free_order")))
    assert outcome_of(delivered, error, safe) in (DIVERGED, HANG)
    assert_matches("the tickets issued on decode/ep differ|nothing can move", str(error))


@pytest.mark.slow
def test_without_headers_a_shared_group_in_free_order_ends_by_luck_or_at_an_exchange(
    safe: dict[int, str],
) -> None:
    delivered, error = played(local(*unsafe("one_group free_order", "L2")))
    assert outcome_of(delivered, error, safe) in (CRASH, DIVERGED)


@pytest.mark.slow
def test_one_window_delivers_wrong_tokens_once_no_header_is_checked() -> None:
    """Messages of equal shape: one row a rank, blocks of fixed size."""
    tasks = [
        Task(prompt=[5], max_tokens=12),
        *(Task(prompt=[n], max_tokens=1) for n in range(6, 11)),
    ]
    equal = (
        "mode=whole_forward",
        'dispatch.prefill="fixed"',
        'dispatch.decode="fixed"',
        "scheduler.chunk_tokens=1",
        "scheduler.max_running=1",
    )
    wanted = safe_digests(local(*equal), tasks)
    assert outcome_of(*played(local(*equal), tasks), wanted) is UNSEEN
    blind = played(local(*equal, *unsafe("one_window", "L2")), tasks)
    assert outcome_of(*blind, wanted) is WRONG
    seen = played(local(*equal, *unsafe("one_window")), tasks)
    assert outcome_of(*seen, wanted) is DIVERGED


# ---- results before the agreement, in a schedule that is the same each time


def emitted_before_the_end(*overrides: str) -> list[TurnResult]:
    """What ranks handed out until the hashes of a step in another order were compared."""
    config = local("unsafe.seed=3", *overrides)
    folder = model_folder(config.model.path)
    world = LocalWorld(2, split=_split, concat=_concat, copy=_copy, slots=SLOTS)
    emitted: list[Event] = []
    ranks = []
    for number in range(2):
        inbox = Inbox()
        for trajectory in range(number, 8, 2):
            inbox.put(
                request(trajectory, num_prompt=3 + 9 * trajectory, num_new=1 + trajectory % 3)
            )
        inbox.put(Stop())
        transport = LocalTransport(world, number, threading.Event())
        ranks.append(compose(config, folder, transport, inbox, emitted.append, num_blocks=64))
    with pytest.raises(DivergedError, match="the tickets issued on decode/ep differ"):
        world.run([rank.engine.run() for rank in ranks])
    return [event for event in emitted if isinstance(event, TurnResult)]


def request(trajectory: int, *, num_prompt: int, num_new: int) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=[(7 * trajectory + 3 * at) % 89 for at in range(num_prompt)],
        seed=0,
        experts_from=0,
        sampling=SamplingParams(max_tokens=num_new),
    )


@pytest.mark.slow
def test_results_of_the_step_that_diverged_get_out_only_by_the_early_commit() -> None:
    ours = emitted_before_the_end(*unsafe("swap"))
    early = emitted_before_the_end(*unsafe("swap early_commit"))
    assert {result.trajectory for result in ours} < {result.trajectory for result in early}


# ---- never by accident


def test_a_safe_job_is_made_of_the_shipped_classes() -> None:
    arms = local().unsafe.arms
    own = {("decode", "ep"): LocalWorld(1, split=_split, concat=_concat, copy=_copy)}
    made = unsafe_communicators(
        arms, {key: world.communicator(key, [0], 0) for key, world in own.items()}, slots=SLOTS
    )
    assert arms == ()
    assert [type(communicator).__name__ for communicator in made.values()] == ["LocalCommunicator"]
    assert unsafe_sequencer(arms, seed=0, slots=SLOTS) is Sequencer
    assert (unsafe_model(arms), unsafe_leader(arms)) == (Model, Leader)


def test_no_preset_brings_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = 'seed = 1\n[unsafe]\narms = ["one_slot"]\n'
    monkeypatch.setattr(
        "interlace.rollout.config_file._read_source", lambda job, preset: (f"preset {preset}", bad)
    )
    with pytest.raises(ConfigError, match="only a job file or --set may bring"):
        load_config(preset="tiny")
    with_ranks = load_config(job=Path("mine.toml"), overrides=["layout.world=2"])
    assert with_ranks.unsafe.arms == ("one_slot",)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("unsafe.arms=['no_such']",), "no_such"),
        (("unsafe.arms=['one_slot', 'one_slot']",), "names one twice"),
        (("unsafe.without=['L1']",), "no arm is on"),
        (("unsafe.arms=['one_slot']", "layout.world=1"), "one rank cannot disagree"),
        (("unsafe.arms=['free_order']", "mode=chunked"), "needs two paths"),
        (("unsafe.arms=['slot_per_path']",), "needs layout.tp of 2 or more"),
        (("unsafe.arms=['one_slot']", "unsafe.without=['L2']", "launch.kind=ray"), "kind local"),
    ],
)
def test_an_arm_that_cannot_bite_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        local(*overrides)


# ---- on the command line


@pytest.mark.slow
def test_the_command_says_in_red_what_it_breaks_and_what_came_of_it(tmp_path: Path) -> None:
    def ran(arm: str) -> tuple[int, str]:
        options = ["--set", f'unsafe.arms=["{arm}"]', "--set", "tasks.0.count=1"]
        out = str(tmp_path / arm)
        result = CliRunner().invoke(app, ["rollout", "--preset", "tiny", "--out", out, *options])
        return result.exit_code, result.output

    code, told = ran("one_slot")
    assert code == 1
    assert "UNSAFE: this run may hang or give wrong tokens" in told
    assert "UNSAFE: one_slot: divergence detected" in told
    code, told = ran("communicator_hashes")
    assert code == 0
    assert "UNSAFE: communicator_hashes: unseen" in told
    summary = json.loads((tmp_path / "communicator_hashes" / "summary.json").read_text())
    assert summary["exact"] is False
    assert summary["unsafe"]["arms"] == ["communicator_hashes"]
    assert summary["unsafe"]["outcome"] == "unseen"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "arms", "said"),
    [
        ("gloo", ["one_group", "free_order"], r"op\.preamble\.length <= op\.nbytes|: crash|: div"),
        ("window", ["one_window"], "holds another collective|was written over before it was read"),
    ],
)
def test_between_processes_it_is_seen_too(
    transport: str, arms: list[str], said: str, tmp_path: Path
) -> None:
    """gloo ends the process of a rank that receives more than its own, else the next exchange or
    arithmetic fails; the window says whose message it is."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    rollout = ["-m", "interlace.rollout.cli", "rollout", "--preset", "tiny"]
    settings = [
        "launch.kind=torchrun",
        f"launch.transport={transport}",
        "scheduler.chunk_tokens=24",
        f"unsafe.arms={arms}",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", *torchrun, *rollout, *options]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=55
    )
    assert ended.returncode != 0
    assert "UNSAFE: this run may hang or give wrong tokens" in ended.stderr
    assert_matches(said, ended.stdout + ended.stderr)
