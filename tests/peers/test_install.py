"""Installing engines: what is there is kept, and what cannot be says why."""

from __future__ import annotations

import json
import zipfile

import gguf
import pytest

from interlace.experiments.peers import install as installing
from interlace.experiments.peers.gguf_checkpoint import write_gguf
from interlace.experiments.peers.install import Home, InstallError, install
from interlace.moe.random_model import write_random_model
from interlace.rollout.peers.contestants import version_of, why_absent


@pytest.fixture
def recipe(monkeypatch):
    """Asked instead of pip: what it returns or raises is what comes of vLLM."""
    told = {"made": 0, "recipe": lambda: "vllm 1", "trial": lambda: None}

    def made(home):
        told["made"] += 1
        return told["recipe"]()

    monkeypatch.setitem(installing.RECIPES, "vllm", made)
    monkeypatch.setattr(installing, "try_out", lambda into, peer: told["trial"]())
    monkeypatch.setattr(Home, "create", lambda self: None)
    return told


def raises(error):
    def function():
        raise error

    return function


def test_an_engine_that_is_there_is_kept(tmp_path, recipe):
    for _ in range(2):
        install(tmp_path, "vllm")
    assert version_of(tmp_path, "vllm") == "vllm 1"
    assert why_absent(tmp_path, "vllm") is None
    assert recipe["made"] == 1


@pytest.mark.parametrize("step", ["recipe", "trial"])
def test_one_that_cannot_be_says_why_and_is_tried_again(tmp_path, recipe, step):
    works = recipe[step]
    recipe[step] = raises(InstallError("ERROR: no wheel\n for this CPU"))
    install(tmp_path, "vllm")
    assert why_absent(tmp_path, "vllm") == "ERROR: no wheel for this CPU"
    recipe[step] = works
    install(tmp_path, "vllm")
    assert why_absent(tmp_path, "vllm") is None
    assert recipe["made"] == 2


def test_another_recipe_installs_again(tmp_path, recipe):
    install(tmp_path, "vllm")
    record = tmp_path / "vllm.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "recipe": "another"}))
    install(tmp_path, "vllm")
    assert recipe["made"] == 2


@pytest.mark.processes
def test_a_step_that_fails_tells_its_last_error(tmp_path):
    home = Home(tmp_path, "vllm")
    home.run("sh", "-c", "echo fine")
    with pytest.raises(InstallError, match="ERROR: no such thing"):
        home.run("sh", "-c", "echo 'ERROR: no such thing'; echo bye; exit 2")
    assert "fine" in (tmp_path / "vllm.log").read_text()


def test_a_wheel_is_asked_what_it_needs_but_for_torch(tmp_path):
    wheel = tmp_path / "some.whl"
    needs = ("torch==2.13.0+cpu", "torchvision; extra == 'x'", "torchaudio", "regex", "zen>=1")
    lines = [f"Requires-Dist: {one}" for one in (*needs, "optional; extra == 'zen'")]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some.dist-info/METADATA", "\n".join(["Name: some", *lines]))
    assert installing._requirements(wheel) == ["regex", "zen>=1"]


def test_a_checkpoint_for_llama_cpp_holds_every_weight(tmp_path):
    folder = write_random_model(tmp_path / "model", "qwen3_moe", 0, num_layers=2, dtype="bfloat16")
    path = tmp_path / "model.gguf"
    write_gguf(folder, path)
    read = gguf.GGUFReader(path)
    shapes = {one.name: [int(n) for n in one.shape] for one in read.tensors}
    assert len(shapes) == 3 + 2 * (4 + 4 + 1 + 3)
    assert shapes["blk.1.ffn_up_exps.weight"] == [64, 64, 8]
    assert shapes["token_embd.weight"] == [64, 320]
    written_at = path.stat().st_mtime_ns
    write_gguf(folder, path)
    assert path.stat().st_mtime_ns == written_at


def test_another_architecture_is_refused(tmp_path):
    folder = write_random_model(tmp_path / "model", "mixtral", 0, num_layers=1)
    with pytest.raises(ValueError, match="a model of type mixtral, not qwen3_moe"):
        write_gguf(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
