from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from interlace.rollout.cache import build_model, cache_folder, model_folder
from interlace.rollout.config import ConfigError


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_folder({"INTERLACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/interlace")
    assert cache_folder({"XDG_CACHE_HOME": "", "INTERLACE_CACHE": ""}) == cache_folder({})
    assert cache_folder({}) == Path.home() / ".cache" / "interlace"


def test_a_named_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path))
    folder = model_folder("tiny-mixtral")
    assert folder == tmp_path / "models" / "tiny-mixtral"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder("tiny-mixtral") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert os.listdir(folder.parent) == ["tiny-mixtral"]


def test_a_folder_is_taken_as_it_is_and_must_hold_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder .*nowhere: give a folder .* tiny-qwen3-moe"):
        model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config.json"):
        model_folder(str(tmp_path))
    (tmp_path / "model-Q4.gguf").write_text("")
    with pytest.raises(ConfigError, match=r"model.path: .*GGUF files are not read"):
        model_folder(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.path: .*LoRA adapter; supported are whole"):
        model_folder(str(tmp_path))
    build_model("tiny-qwen3-moe", tmp_path / "model", seed=3)
    assert model_folder(str(tmp_path / "model")) == tmp_path / "model"


def test_models_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write model tiny-mixtral .*INTERLACE_CACHE"):
        build_model("tiny-mixtral", tmp_path / "file" / "model")
    with pytest.raises(ConfigError, match="there is no model 'gpt': choose one of smollm2-moe"):
        build_model("gpt", tmp_path / "model")


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        build_model("tiny-mixtral", tmp_path / "model", unknown=3)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write"):
        build_model("tiny-mixtral", tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]
    assert os.listdir(tmp_path / "taken") == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.processes
def test_processes_that_build_at_once_get_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(model_folder, ["tiny-qwen3-moe"] * 2, chunksize=1)
    assert folders == [tmp_path / "models" / "tiny-qwen3-moe"] * 2
    assert os.listdir(tmp_path / "models") == ["tiny-qwen3-moe"]
