"""What a rank announces is what it holds, to the end of the step in which it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interlace.moe.config import read_config
from interlace.moe.random_model import write_random_model
from interlace.moe.weights import Weights, load_weights
from interlace.rollout.weights_sync.shelf import Shelf


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = write_random_model(tmp_path_factory.mktemp("m"), "llama", 1, num_layers=1)
    return load_weights(folder, read_config(folder), expert_ids=(), dtype=torch.float32)


@pytest.fixture
def shelf(first: Weights) -> Shelf:
    shelf = Shelf(first)
    for version in (3, 5):
        shelf.put(replace(first, version=version), f"digest {version}")
    return shelf


def test_only_what_is_committed_is_announced(shelf: Shelf) -> None:
    assert shelf.ready() == 0
    shelf.commit(3, "keep")
    assert shelf.ready() == 3
    shelf.commit(4, "keep")  # it is not held
    assert shelf.ready() == 3


def test_versions_between_that_in_use_and_the_newest_can_be_installed(shelf: Shelf) -> None:
    shelf.commit(3, "retract")
    shelf.commit(5, "abort")
    assert shelf.ready() == 5
    assert shelf.install(3).version == 3
    assert (shelf.in_use.version, shelf.digest, shelf.mode_of(3)) == (3, "digest 3", "retract")
    assert shelf.install(5).version == 5
    assert shelf.mode_of(5) == "abort"
    assert shelf.ready() == 5


def test_what_is_discarded_stays_to_the_end_of_the_step_that_may_install_it(shelf: Shelf) -> None:
    shelf.commit(3, "keep")
    assert shelf.ready() == 3
    shelf.discard(3)
    assert shelf.install(3).version == 3


def test_what_is_discarded_is_not_announced_again(shelf: Shelf) -> None:
    shelf.commit(3, "keep")
    shelf.discard(3)
    assert shelf.ready() == 0
    with pytest.raises(KeyError):
        shelf.install(3)
    shelf.commit(3, "keep")
    assert shelf.ready() == 0


def test_a_version_that_was_discarded_can_come_again(shelf: Shelf, first: Weights) -> None:
    shelf.discard(3)
    shelf.put(replace(first, version=3), "another digest")
    shelf.commit(3, "keep")
    assert shelf.ready() == 3
    shelf.install(3)
    assert shelf.digest == "another digest"


def test_older_versions_are_gone_after_an_install(shelf: Shelf) -> None:
    shelf.commit(5, "keep")
    shelf.install(5)
    with pytest.raises(KeyError):
        shelf.install(3)
