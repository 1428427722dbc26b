"""Small checkpoints, written once a session, and every choice of kernels."""

import importlib.util
from pathlib import Path

import pytest
import torch

from interlace.moe import kernels
from interlace.moe.config import ARCHITECTURES, ModelConfig, read_config
from interlace.moe.random_model import write_random_model

CHOICES = () if kernels.native is None else kernels.native.choices()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of every architecture; the two that came first are the deepest."""
    root = tmp_path_factory.mktemp("tiny")
    return {
        name: write_random_model(root / name, name, 1, num_layers=4 if place < 2 else 2)
        for place, name in enumerate(ARCHITECTURES)
    }


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> tuple[Path, ModelConfig]:
    folder = tiny_folders[request.param]
    return folder, read_config(folder)


@pytest.fixture(params=kernels.DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every type that our own kernels compute in."""
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=CHOICES)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels of one choice in place of the best, in a module of their own."""
    found = kernels.native.__spec__
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    chosen: str = request.param
    module.use(chosen)
    monkeypatch.setattr(kernels, "native", module)
    return chosen
