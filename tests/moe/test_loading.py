"""Damaged and foreign model folders: one clear error each, before anything is allocated."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interlace.moe.checkpoint import Checkpoint
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.mixture import MixtureLayer
from interlace.moe.weights import load_weights

Q = "model.layers.1.self_attn.q_proj.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, config: ModelConfig | None = None) -> Any:
    config = config or read_config(folder)
    return load_weights(folder, config, expert_ids=(0, 1), dtype=torch.float32)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.pop(name))


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def cut_short(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1000])


def header(text: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text)

    return write


def pickled_only(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def index_of(weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / FILE).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return write


WRONG_SIZE = json.dumps({Q: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 0]}}).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(Q), f"tensor {Q} is in none of its safetensors files"),
        (
            without("model.layers.3.block_sparse_moe.experts.7.w2.weight"),
            "tensor model.layers.3.block_sparse_moe.experts.7.w2.weight is in none",
        ),
        (with_tensor(Q, torch.zeros(3, 64)), f"{Q} has shape [3, 64], but config.json asks for"),
        (with_tensor(Q, torch.zeros(256, 64, dtype=torch.int8)), f"tensor {Q} has type I8"),
        (
            with_tensor("model.layers.4.extra", torch.zeros(1)),
            "tensor model.layers.4.extra has no place in a mixtral of 4 layers",
        ),
        (
            with_tensor("base_model.model.q_proj.lora_A.weight", torch.zeros(1)),
            "lora_A.weight belongs to a LoRA adapter; supported are whole models",
        ),
        (cut_short, "truncated: tensor"),
        (lambda folder: (folder / FILE).write_bytes(b"abc"), "not a whole safetensors file"),
        (header(b"not json"), "damaged safetensors header"),
        (header(b'{"a": {"dtype": "F32"}}'), "damaged safetensors header"),
        (header(WRONG_SIZE), "has 0 bytes, which is not F32 of shape [4, 4]"),
        (pickled_only, "only pytorch_model.bin found"),
        (lambda folder: (folder / FILE).unlink(), f"neither {FILE} nor {INDEX} is there"),
        (index_of({"a": "gone.safetensors"}), "names gone.safetensors, which is missing"),
        (index_of({"a": "../x.safetensors"}), "outside the folder"),
        (index_of([1]), "no usable weight_map"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(
    tiny_folders: dict[str, Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_folders["mixtral"], folder)
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_pickle_says_what_is_needed_instead(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(tiny_folders["mixtral"] / "config.json", tmp_path)
    (tmp_path / "model.pt").write_bytes(b"anything")
    with pytest.raises(ModelError, match="safetensors is needed"):
        load(tmp_path)


def test_nothing_is_read_before_everything_is_checked(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    config = replace(read_config(tiny_folders["mixtral"]), vocab_size=321)
    with pytest.raises(ModelError, match="embed_tokens"):
        load(tiny_folders["mixtral"], config)


def test_tied_embeddings_ignore_a_head_that_was_saved_all_the_same(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["mixtral"]
    config = replace(read_config(folder), tie_embeddings=True)
    x_SD = torch.randn(2, 64)
    weights = load(folder, config)
    torch.testing.assert_close(weights.head(x_SD), x_SD @ weights.embed_VD.T)
    untied = load(folder)
    assert not torch.allclose(untied.head(x_SD), weights.head(x_SD))


def test_a_rank_holds_its_own_experts_and_its_version(tiny: tuple[Path, ModelConfig]) -> None:
    folder, config = tiny
    weights = load_weights(folder, config, expert_ids=(6, 3), dtype=torch.bfloat16, version=4)
    assert weights.expert_ids == (6, 3)
    assert weights.version == 4
    owned = [
        len(layer.feed_forward.experts)
        for layer in weights.layers
        if isinstance(layer.feed_forward, MixtureLayer)
    ]
    assert owned == [2] * config.num_moe_layers
    assert weights.embed_VD.dtype == torch.bfloat16


def test_layers_that_predict_further_tokens_are_left_out(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_folders["deepseek_v3"], folder)
    with_tensor("model.layers.2.eh_proj.weight", torch.zeros(1))(folder)
    with pytest.raises(ModelError, match=r"eh_proj\.weight has no place in a deepseek_v3 of 2"):
        load(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    assert len(load(folder).layers) == 2
