"""A rank says `Staged` once for every version it is told to stage, whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.weights.nudged import nudged

from interlace.moe.config import read_config
from interlace.moe.random_model import write_random_model
from interlace.moe.received_names import ReceivedNames
from interlace.moe.weights import load_weights
from interlace.rollout.config import WeightsSection
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import (
    Abort,
    Commit,
    Discard,
    Event,
    Stage,
    Staged,
    StageFolder,
    StageGroup,
    StageSame,
    Taken,
    WeightsCommand,
    decode_command,
    encode,
)
from interlace.rollout.weights_sync.arrival import digest_of_model
from interlace.rollout.weights_sync.attempt import Attempt
from interlace.rollout.weights_sync.outgoing import Outgoing
from interlace.rollout.weights_sync.stager import Stager


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("m"), "qwen3_moe", 1, num_layers=2)


class Rank:
    """A stager whose commands are obeyed at once, and what it has said."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        config = read_config(folder)
        self.said: list[Event] = []
        self.inbox = Inbox()
        self.stager = Stager(
            rank=1,
            folder=folder,
            config=config,
            section=WeightsSection(bucket_mib=1, root=None if root is None else str(root)),
            weights=load_weights(folder, config, expert_ids=(1, 2), dtype=torch.float32),
            inbox=self.inbox,
            emit=self.said.append,
        )

    def tell(self, *commands: WeightsCommand) -> None:
        for command in commands:
            self.stager._obey(decode_command(encode(command)))  # type: ignore[arg-type]

    @property
    def staged(self) -> list[tuple[int, str | None]]:
        return [(e.version, e.error) for e in self.said if isinstance(e, Staged)]


@pytest.fixture
def rank(folder: Path) -> Rank:
    return Rank(folder)


def stages(folder: Path, version: int) -> tuple[list[Stage], str]:
    """The commands for other weights, and their digest."""
    outgoing = Outgoing(ReceivedNames(read_config(folder)), 300_000)
    attempt = Attempt(number=version, version=version)
    made = list(outgoing.stages(attempt, [nudged(folder, version)], complete=True))
    assert len(made) > 3
    return made, outgoing.digest()


def test_a_version_that_has_come_completely_is_held_and_used_once_committed(
    rank: Rank, folder: Path
) -> None:
    made, digest = stages(folder, 1)
    rank.tell(*made)
    assert rank.staged == [(1, None)]
    (said,) = [event for event in rank.said if isinstance(event, Staged)]
    assert (said.rank, said.digest) == (1, digest)
    taken = [event.index for event in rank.said if isinstance(event, Taken)]
    assert taken == list(range(len(made)))
    assert rank.stager.ready() == 0
    rank.tell(Commit(version=1, mode="retract"))
    assert rank.stager.ready() == 1
    assert rank.stager.install(1).version == 1
    assert rank.stager.mode_of(1) == "retract"


def out_of_order(made: Sequence[Stage]) -> list[WeightsCommand]:
    return [made[0], made[2], made[1]]


def discarded(made: Sequence[Stage]) -> list[WeightsCommand]:
    return [*made[:2], Discard(version=1), made[2]]


def begun_again(made: Sequence[Stage]) -> list[WeightsCommand]:
    return [*made[:2], StageSame(attempt=2, version=2)]


def too_short(made: Sequence[Stage]) -> list[WeightsCommand]:
    num = len(made) - 1
    last = Stage(attempt=1, version=1, bucket=made[-1].bucket, index=num - 1, total=num)
    return [*made[:-2], last]


def damaged(made: Sequence[Stage]) -> list[WeightsCommand]:
    return [Stage(attempt=1, version=1, bucket=memoryview(b"nonsense"), index=0, total=1)]


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (out_of_order, "bucket 2 came behind 1 others"),
        (discarded, "it was discarded"),
        (begun_again, "another one came"),
        (too_short, "tensor "),
        (damaged, "ValidationError: "),
    ],
)
def test_what_goes_wrong_is_said_once_and_the_next_version_comes_as_if_nothing_had_been(
    rank: Rank, folder: Path, broken: object, error: str
) -> None:
    made, _ = stages(folder, 1)
    rank.tell(*broken(made), Discard(version=1))  # type: ignore[operator]
    failed = [text for version, text in rank.staged if version == 1]
    assert len(failed) == 1
    assert (failed[0] or "").startswith(error)
    rank.tell(*stages(folder, 3)[0], Commit(version=3, mode="keep"))
    assert rank.staged[-1] == (3, None)
    assert rank.stager.ready() == 3


def test_another_number_has_the_digest_of_what_is_in_use(rank: Rank, folder: Path) -> None:
    rank.tell(StageSame(attempt=4, version=4))
    names = ReceivedNames(read_config(folder))
    first = digest_of_model(folder, names, 1 << 20)
    assert [e.digest for e in rank.said if isinstance(e, Staged)] == [first]
    made, digest = stages(folder, 5)
    rank.tell(*made, Commit(version=5, mode="keep"))
    rank.stager.install(5)
    rank.tell(StageSame(attempt=6, version=6))
    assert [e.digest for e in rank.said if isinstance(e, Staged)] == [first, digest, digest]


def test_a_rank_looks_itself_whether_a_folder_lies_under_the_root(folder: Path) -> None:
    rank = Rank(folder, folder.parent)
    rank.tell(StageFolder(attempt=1, version=1, folder=str(folder)))
    rank.tell(StageFolder(attempt=2, version=2, folder=str(folder.parent.parent)))
    rank.tell(StageFolder(attempt=3, version=3, folder=str(folder / "none")))
    (_, first), (_, second), (_, third) = rank.staged
    assert first is None
    assert "not under weights.root" in (second or "")
    assert "no such folder" in (third or "")


@pytest.mark.slow
def test_a_trainer_who_is_not_there_is_an_error_in_time(rank: Rank) -> None:
    rank.tell(StageGroup(attempt=1, version=1, host="127.0.0.1", port=1, world=2, timeout_s=0.5))
    assert "the trainer at 127.0.0.1:1 was not there or was lost" in (rank.staged[0][1] or "")


def test_what_is_about_weights_does_not_reach_the_loop(rank: Rank) -> None:
    abort, same = Abort(trajectory=3), StageSame(attempt=1, version=1)
    rank.inbox.put(same)
    rank.inbox.put(abort)
    assert rank.inbox.drain() == [abort]
    assert rank.inbox.take_weights() == same
    assert not rank.inbox.has_weights


def test_a_trainer_that_has_died_is_waited_for_no_longer_than_the_driver_does(rank: Rank) -> None:
    began_at = time.monotonic()
    rank.inbox.put(Discard(version=1))
    rank.tell(StageGroup(attempt=1, version=1, host="127.0.0.1", port=1, world=2, timeout_s=50.0))
    ((version, error),) = rank.staged
    assert version == 1
    assert error is not None
    assert "was not there" in error
    assert time.monotonic() - began_at < 20


def test_its_thread_leaves_when_it_is_told_to(rank: Rank) -> None:
    with rank.stager as stager:
        thread = stager._thread
        assert thread.is_alive()
    assert not thread.is_alive()
