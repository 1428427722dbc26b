"""A trainer's process group: everybody gets everything, or everybody an error in time."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.weights.nudged import nudged

from interlace.experiments.updates_under_load.trainer import start_trainer
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.incoming import Incoming, Share
from interlace.moe.random_model import write_random_model
from interlace.rollout.weights_sync import TrainerGroup, UpdateError
from interlace.rollout.weights_sync.pieces import take_in

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("m"), "qwen3_moe", 1)


def group_of(world: int) -> TrainerGroup:
    with socket.create_server((HOST, 0)) as probe:
        return TrainerGroup(HOST, probe.getsockname()[1], world)


def received(
    group: TrainerGroup,
    config: ModelConfig,
    rank: int,
    version: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """What a rank does; the digest, which is the trainer's too."""
    incoming = Incoming(Share.of(config, ()))
    for item in group.receive(rank, version, timeout_s):
        if isinstance(item, str):
            assert item == incoming.total()
        else:
            take_in(incoming, item)
    return incoming.total()


def together(*work: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, each in a thread of its own."""
    found: list[Any] = [None] * len(work)

    def run(place: int) -> None:
        try:
            found[place] = work[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_ranks_get_what_the_trainer_has(folder: Path, num_ranks: int) -> None:
    group, config, tensors = group_of(1 + num_ranks), read_config(folder), nudged(folder, 1)
    digests = together(
        lambda: group.send(tensors, folder, version=1, timeout_s=TIMEOUT_S, bucket_mib=1),
        *(lambda rank=rank: received(group, config, rank) for rank in range(num_ranks)),
    )
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64
    assert not dist.is_initialized()


def test_what_is_not_the_models_is_an_error_before_anybody_is_waited_for(folder: Path) -> None:
    tensors = nudged(folder, 1)
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        group_of(2).send(tensors, folder, version=1)


def test_another_version_is_one_clear_error(folder: Path) -> None:
    group, config = group_of(2), read_config(folder)
    sent, other = together(
        lambda: group.send(nudged(folder, 1), folder, version=3, timeout_s=2.0),
        lambda: received(group, config, 0, version=4),
    )
    assert isinstance(other, UpdateError)
    assert "sends version 3 to a group of 2, version 4 and 2 were asked for" in str(other)
    assert isinstance(sent, UpdateError)


def test_nobody_there_is_an_error_at_the_deadline(folder: Path) -> None:
    began_at = time.monotonic()
    with pytest.raises(UpdateError, match="was not there or was lost"):
        next(group_of(2).receive(0, 1, 1.0))
    with pytest.raises(UpdateError, match="version 1 was not sent to all ranks"):
        group_of(2).send(nudged(folder, 1), folder, version=1, timeout_s=1.0)
    assert time.monotonic() - began_at < 10


def test_a_rank_that_refuses_is_an_error_of_the_trainer(folder: Path) -> None:
    group = group_of(2)

    def refuse() -> None:
        for _ in group.receive(0, 1, TIMEOUT_S):
            raise ModelError("not for me")

    sent, refused = together(
        lambda: group.send(nudged(folder, 1), folder, version=1, timeout_s=TIMEOUT_S), refuse
    )
    assert isinstance(sent, UpdateError)
    assert isinstance(refused, ModelError)


class Breaking(dict[str, torch.Tensor]):
    """Tensors that cannot be read any more after a while."""

    left = 70

    def __getitem__(self, name: str) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise OSError("the disk is gone")
        return super().__getitem__(name)


def test_an_error_that_a_trainer_keeps_does_not_keep_the_ranks_waiting(folder: Path) -> None:
    group, config = group_of(2), read_config(folder)
    began_at = time.monotonic()
    sent, lost = together(  # which keeps the errors, and all that they refer to
        lambda: group.send(Breaking(nudged(folder, 1)), folder, version=1, bucket_mib=1),
        lambda: received(group, config, 0, timeout_s=45.0),
    )
    assert time.monotonic() - began_at < 30
    assert "the disk is gone" in str(sent)
    assert "was not there or was lost" in str(lost)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "dies_after"), [(2, 1), (4, 46)], ids=["at once", "in the middle"]
)
def test_a_trainer_that_is_killed_while_it_sends_is_an_error_long_before_the_deadline(
    folder: Path, num_ranks: int, dies_after: int
) -> None:
    group, config = group_of(1 + num_ranks), read_config(folder)
    trainer = start_trainer(folder, group.port, group.world, 1, dies_after=dies_after)
    assert trainer.is_alive(), "it waits for the ranks"
    began_at = time.monotonic()
    found = together(
        *(
            lambda rank=rank: received(group, config, rank, timeout_s=45.0)
            for rank in range(num_ranks)
        )
    )
    trainer.join(10)
    assert trainer.exitcode == -signal.SIGKILL
    assert time.monotonic() - began_at < 30
    for error in found:
        assert isinstance(error, UpdateError)
        assert "was not there or was lost" in str(error)


def test_bfloat16_travels_as_it_is(folder: Path) -> None:
    group, config = group_of(2), read_config(folder)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in nudged(folder, 1).items()}
    digests = together(
        lambda: group.send(tensors, folder, version=1, timeout_s=TIMEOUT_S),
        lambda: received(group, config, 0),
    )
    assert digests[0] == digests[1]
