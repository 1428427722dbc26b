"""Small checkpoints, written once a session."""

from pathlib import Path

import pytest

from interlace.moe.config import ARCHITECTURES, ModelConfig, read_config
from interlace.moe.random_model import write_random_model


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of every architecture."""
    root = tmp_path_factory.mktemp("tiny")
    return {name: write_random_model(root / name, name, seed=1) for name in ARCHITECTURES}


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> tuple[Path, ModelConfig]:
    folder = tiny_folders[request.param]
    return folder, read_config(folder)
