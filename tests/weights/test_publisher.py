"""Two phases over ranks that are lists of what to answer: to all, or to none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interlace.moe.config import read_config
from interlace.moe.incoming import Incoming, Share
from interlace.moe.random_model import write_random_model
from interlace.rollout.config import WeightsSection
from interlace.rollout.messages import (
    Commit,
    Discard,
    Installed,
    Stage,
    Staged,
    StageSame,
    Taken,
    WeightsCommand,
)
from interlace.rollout.weights_sync.errors import UpdateError
from interlace.rollout.weights_sync.pieces import take_in, unpack
from interlace.rollout.weights_sync.publisher import Publisher

WORLD = 3
SECTION = WeightsSection(bucket_mib=1, timeout_s=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("m"), "mixtral", 1)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.rollout.weights_sync.publisher._GRACE_S", 0.0)


class Ranks:
    """Answer at once, in the thread that tells them, unless they are to be `silent`, `refuse` or
    have `other` numbers."""

    def __init__(self, folder: Path) -> None:
        self.told: list[list[WeightsCommand]] = [[] for _ in range(WORLD)]
        self.silent: set[tuple[int, type]] = set()
        self.withheld: set[int] = set()
        self.refuse: dict[int, str] = {}
        self.other: set[int] = set()
        self.on_told: Callable[[int, WeightsCommand], None] = lambda rank, command: None
        self.on_staged: Callable[[], None] = lambda: None
        self.publisher = Publisher(world=WORLD, tell=self.tell, folder=folder, section=SECTION)
        self._folder = folder
        self.attempt = 0
        self._digests: dict[int, str] = {}

    def tell(self, rank: int, command: WeightsCommand) -> None:
        self.told[rank].append(command)
        self.on_told(rank, command)
        if (rank, type(command)) in self.silent:
            return
        deliver = self.publisher.deliver
        match command:
            case Stage():
                self.attempt = command.attempt
                deliver(Taken(rank=rank, attempt=command.attempt, index=command.index))
                if command.index == 0 and rank in self.refuse:
                    self.staged(rank, command.version, self.refuse[rank])
                elif command.total and rank not in self.refuse and rank not in self.withheld:
                    self.staged(rank, command.version, None)
            case StageSame():
                self.attempt = command.attempt
                self.staged(rank, command.version, None)
            case Commit():
                deliver(
                    Installed(
                        rank=rank,
                        version=command.version,
                        step=9,
                        stall_s=0.001 * rank,
                        dropped_tokens=rank,
                        aborted=[10 - rank],
                    )
                )

    def staged(
        self, rank: int, version: int, error: str | None, attempt: int | None = None
    ) -> None:
        digest = "" if error else "other" if rank in self.other else self.digest(version)
        self.publisher.deliver(
            Staged(
                rank=rank,
                attempt=attempt or self.attempt,
                version=version,
                digest=digest,
                num_bytes=100 + rank,
                seconds=0.0,
                error=error,
            )
        )
        self.on_staged()

    def digest(self, version: int) -> str:
        """What a rank makes of what it was told."""
        if version not in self._digests:
            share = Share.of(read_config(self._folder), ())
            incoming = Incoming(share)
            for command in self.told[0]:
                if isinstance(command, Stage) and command.version == version:
                    incoming = Incoming(share) if command.index == 0 else incoming
                    take_in(incoming, unpack(command.bucket))
            self._digests[version] = incoming.total()
        return self._digests[version]

    def kinds(self, rank: int) -> list[str]:
        names = [type(command).__name__ for command in self.told[rank]]
        return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


@pytest.fixture
def ranks(folder: Path) -> Ranks:
    return Ranks(folder)


Tensors = dict[str, torch.Tensor]


def test_an_update_is_staged_and_committed_on_all_ranks(ranks: Ranks, tensors: Tensors) -> None:
    report = ranks.publisher.update(tensors, mode="retract")
    assert [ranks.kinds(rank) for rank in range(WORLD)] == [["Stage", "Commit"]] * WORLD
    assert (report.version, report.mode) == (1, "retract")
    assert report.num_bytes == sum(t.nbytes for t in tensors.values())
    assert report.rank_bytes == (100, 101, 102)
    assert (report.stall_s, report.dropped_tokens, report.aborted) == (0.002, 3, (8, 9, 10))
    assert ranks.publisher.version == 1
    assert ranks.publisher.digest == report.digest == ranks.digest(1)
    assert "version 1 (retract): 2." in report.text


def test_no_part_is_larger_than_a_bucket(ranks: Ranks, tensors: Tensors) -> None:
    ranks.publisher.update(tensors)
    parts = [command for command in ranks.told[0] if isinstance(command, Stage)]
    assert [part.total for part in parts] == [0, 0, 3]
    assert all(part.bucket.nbytes < (1 << 20) + 20_000 for part in parts)


def test_one_refusal_discards_it_everywhere_and_names_rank_and_cause(
    ranks: Ranks, tensors: Tensors
) -> None:
    ranks.publisher.update(tensors)
    before = ranks.publisher.digest
    ranks.refuse = {1: "it did not fit"}
    with pytest.raises(UpdateError, match="version 2 was refused: rank 1: it did not fit"):
        ranks.publisher.update(tensors)
    for rank in range(WORLD):
        assert ranks.told[rank][-1] == Discard(version=2)
        assert sum(isinstance(command, Commit) for command in ranks.told[rank]) == 1
    assert (ranks.publisher.version, ranks.publisher.digest) == (1, before)


def test_a_rank_with_other_numbers_is_named(ranks: Ranks, tensors: Tensors) -> None:
    ranks.other = {2}
    with pytest.raises(UpdateError, match="version 1: rank 2 received other numbers: other, not"):
        ranks.publisher.update(tensors)
    assert "Commit" not in ranks.kinds(0)


def test_after_a_refusal_the_same_version_can_be_tried_again(
    ranks: Ranks, tensors: Tensors
) -> None:
    ranks.refuse = {1: "not now"}
    with pytest.raises(UpdateError):
        ranks.publisher.update(tensors, 4)
    # The others learn of it late, and answer late.
    ranks.refuse = {}
    for rank in (0, 2):
        ranks.staged(rank, 4, "it was discarded")
    assert ranks.publisher.update(tensors, 4).version == 4


def test_what_a_rank_says_to_an_update_that_failed_is_not_taken_for_the_next(
    ranks: Ranks, tensors: Tensors
) -> None:
    ranks.refuse = {1: "not now"}
    with pytest.raises(UpdateError, match="rank 1: not now"):
        ranks.publisher.update(tensors, 4)
    ranks.refuse, ranks.withheld = {}, {0}
    ranks.staged(2, 4, "it was discarded")

    def late(rank: int, command: WeightsCommand) -> None:
        if rank == 0 and isinstance(command, Stage) and command.total:
            ranks.staged(0, 4, None, attempt=1)  # the one that failed

    ranks.on_told = late
    with pytest.raises(UpdateError, match=r"did not hold it within 0\.05 s"):
        ranks.publisher.update(tensors, 4)
    assert all("Commit" not in ranks.kinds(rank) for rank in range(WORLD))


def test_a_rank_that_is_silent_is_an_error_at_the_deadline(ranks: Ranks, tensors: Tensors) -> None:
    ranks.silent = {(2, Stage)}
    with pytest.raises(UpdateError, match=r"did not take a bucket within 0\.05 s"):
        ranks.publisher.update(tensors)
    assert "Commit" not in ranks.kinds(0)


def test_a_number_that_was_committed_is_spent(ranks: Ranks, tensors: Tensors) -> None:
    ranks.silent = {(1, Commit)}
    with pytest.raises(UpdateError, match=r"did not use it within 0\.05 s"):
        ranks.publisher.update(tensors, 7)
    assert ranks.told[0][-1] == Discard(version=7)
    with pytest.raises(ValueError, match="version 7 is not newer than 7"):
        ranks.publisher.update(tensors, 7)


def test_a_version_that_is_installed_although_its_update_was_given_up_is_known(
    ranks: Ranks, tensors: Tensors
) -> None:
    ranks.silent = {(1, Commit)}
    with pytest.raises(UpdateError):
        ranks.publisher.update(tensors, 7)
    assert ranks.publisher.version == 0
    ranks.silent = set()
    ranks.tell(1, Commit(version=7, mode="keep"))
    assert (ranks.publisher.version, ranks.publisher.digest) == (7, ranks.digest(7))


@pytest.mark.parametrize("version", [0, 3])
def test_versions_only_grow(ranks: Ranks, tensors: Tensors, version: int) -> None:
    ranks.publisher.update(tensors, 3)
    with pytest.raises(ValueError, match=f"version {version} is not newer than 3"):
        ranks.publisher.update(tensors, version)


def test_a_mode_that_is_none_is_an_error(ranks: Ranks, tensors: Tensors) -> None:
    with pytest.raises(ValueError, match="mode 'same' is none of keep, retract, abort"):
        ranks.publisher.update(tensors, mode="same")  # type: ignore[arg-type]


def test_a_source_that_breaks_off_discards_what_was_staged(ranks: Ranks, tensors: Tensors) -> None:
    def broken() -> object:
        yield tensors
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ranks.publisher.update(broken())  # type: ignore[arg-type]
    assert [ranks.kinds(rank) for rank in range(WORLD)] == [["Stage", "Discard"]] * WORLD


def test_a_crash_between_the_phases_discards(ranks: Ranks, tensors: Tensors) -> None:
    class Crash(BaseException):
        pass

    def crash(attempt: object) -> None:
        raise Crash

    ranks.publisher._await_positions = crash  # type: ignore[assignment]
    with pytest.raises(Crash):
        ranks.publisher.update(tensors)
    assert [ranks.kinds(rank) for rank in range(WORLD)] == [["Stage", "Discard"]] * WORLD
    assert ranks.publisher.version == 0


def test_an_update_waits_for_the_positions_it_was_scheduled_at(
    ranks: Ranks, tensors: Tensors
) -> None:
    publisher, staged = ranks.publisher, threading.Event()
    publisher.barrier.at({1: {7: 5, 8: 2}})
    ranks.on_staged = staged.set
    updating = threading.Thread(target=publisher.update, args=(tensors,))
    updating.start()
    assert staged.wait(5)
    publisher.barrier.held(7, 1)
    assert "Commit" not in ranks.kinds(0)
    publisher.barrier.ended(8)
    updating.join(5)
    assert publisher.version == 1
    assert publisher.barrier.holds(9, 0) == []


def test_a_failure_of_the_job_ends_an_update_and_all_later_ones(
    ranks: Ranks, tensors: Tensors
) -> None:
    ranks.withheld = {0}
    ranks.on_staged = lambda: ranks.publisher.end("rank 0 is dead")
    for _ in range(2):
        with pytest.raises(UpdateError, match="rank 0 is dead"):
            ranks.publisher.update(tensors)


def test_another_number_keeps_the_digest_and_stages_nothing(ranks: Ranks, tensors: Tensors) -> None:
    ranks._digests[5] = first = ranks.publisher.digest
    report = ranks.publisher.rename(5)
    assert (report.mode, report.num_bytes, report.digest) == ("same", 0, first)
    assert ranks.told[1] == [StageSame(attempt=1, version=5), Commit(version=5, mode="same")]
    assert ranks.publisher.version == 5
