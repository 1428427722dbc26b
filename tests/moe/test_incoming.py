"""Weights that arrive are those of a folder: any layout, any architecture, only a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.moe.their_models import THEIR_MODELS, build

from interlace.moe import kernels
from interlace.moe.alone import forward_alone, logprobs_alone
from interlace.moe.checkpoint import Checkpoint
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.incoming import Incoming, Share
from interlace.moe.received_names import ReceivedNames
from interlace.moe.weights import Weights, load_weights, next_weights
from interlace.rollout.weights_sync.pieces import pieces_of, take_in
from interlace.rollout.weights_sync.sources import StateDict

Tensors = Mapping[str, torch.Tensor]
IDS = [(37 * i + 5) % 150 for i in range(70)]
SMALL = 1000
"""Bytes of a bucket that cuts nearly every tensor."""


def arrived(
    config: ModelConfig, tensors: Tensors, expert_ids: tuple[int, ...], bucket: int = SMALL
) -> Incoming:
    incoming = Incoming(Share.of(config, expert_ids))
    for pieces in pieces_of(StateDict(tensors), ReceivedNames(config), bucket, complete=True):
        assert sum(p.data.nbytes for p in pieces) <= max(bucket, max(map(row_bytes, pieces)))
        take_in(incoming, pieces)
    return incoming


def row_bytes(piece: object) -> int:
    shape: tuple[int, ...] = piece.shape  # type: ignore[attr-defined]
    return int(torch.Size(shape[1:]).numel()) * 8


def whole(folder: Path, config: ModelConfig) -> Weights:
    return load_weights(folder, config, expert_ids=range(config.num_experts), dtype=torch.float32)


def test_a_model_that_arrives_in_pieces_computes_as_the_one_in_its_folder(
    tiny: tuple[Path, ModelConfig],
) -> None:
    folder, config = tiny
    loaded = whole(folder, config)
    incoming = arrived(config, load_file(folder / "model.safetensors"), loaded.expert_ids)
    digest = incoming.total()
    made = next_weights(loaded, incoming, config, version=3)
    assert made.version == 3
    assert len(digest) == 64
    ours, theirs = forward_alone(config, made, IDS), forward_alone(config, loaded, IDS)
    assert torch.equal(ours.logits_SV, theirs.logits_SV)
    assert torch.equal(ours.experts_TLK, theirs.experts_TLK)


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIR_MODELS)
def test_what_transformers_holds_in_memory_is_understood(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    loaded = whole(tmp_path, config)
    state = model.state_dict()
    made = next_weights(
        loaded, arrived(config, state, loaded.expert_ids, 1 << 20), config, version=1
    )
    ours, theirs = forward_alone(config, made, IDS), forward_alone(config, loaded, IDS)
    assert torch.equal(ours.logits_SV, theirs.logits_SV)


def test_both_layouts_have_one_digest(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["mixtral"]
    config, hub = read_config(folder), load_file(folder / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in stacked(hub))
    digests = {arrived(config, tensors, ()).total() for tensors in (hub, stacked(hub))}
    assert len(digests) == 1
    other = {**hub, "model.norm.weight": hub["model.norm.weight"] + 1e-6}
    assert arrived(config, other, ()).total() not in digests


def stacked(hub: Tensors) -> dict[str, torch.Tensor]:
    """A Mixtral of the hub as transformers 5 holds it."""
    found = {}
    for name, tensor in hub.items():
        head, _, tail = name.partition(".block_sparse_moe.")
        if tail == "gate.weight":
            found[f"{head}.mlp.gate.weight"] = tensor
        elif not tail:
            found[name] = tensor
        elif tail == "experts.0.w1.weight":
            of = [f"{head}.block_sparse_moe.experts.{number}" for number in range(8)]
            found[f"{head}.mlp.experts.gate_up_proj"] = torch.stack(
                [torch.cat((hub[f"{e}.w1.weight"], hub[f"{e}.w3.weight"])) for e in of]
            )
            found[f"{head}.mlp.experts.down_proj"] = torch.stack(
                [hub[f"{e}.w2.weight"] for e in of]
            )
    return found


@pytest.mark.parametrize("architecture", ["mixtral", "granitemoe"])
def test_a_rank_keeps_its_own_experts_and_nothing_of_the_others(
    tiny_folders: dict[str, Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)  # an arena holds more than is taken of it
    folder = tiny_folders[architecture]
    config, hub = read_config(folder), load_file(folder / "model.safetensors")
    everything = sum(t.nbytes for t in hub.values())
    experts = sum(t.nbytes for name, t in hub.items() if "expert" in name or "_linear" in name)
    half = arrived(config, hub, (1, 3, 4, 6))
    assert half.num_bytes == everything - experts // 2
    loaded = load_weights(folder, config, expert_ids=(1, 3, 4, 6), dtype=torch.float32)
    made = next_weights(loaded, half, config, version=1)
    assert storage_bytes(made) <= storage_bytes(loaded) <= half.num_bytes + slack(loaded)


def slack(weights: Weights) -> int:
    """What is made and not loaded: rotary tables and padding."""
    return weights.cos_PE.nbytes + weights.sin_PE.nbytes + 4096


def storage_bytes(weights: Weights) -> int:
    """Bytes of all memory that can be reached from the weights."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left: list[object] = [weights]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, (int, str, float)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (tuple, list)):
            left += item
        else:
            names = getattr(type(item), "__slots__", ())
            left += [getattr(item, name) for name in names if hasattr(item, name)]
    return sum(found.values())


def test_the_rows_of_other_tensor_parallel_ranks_do_not_stay(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)
    folder = tiny_folders["llama"]
    config, hub = read_config(folder), load_file(folder / "model.safetensors")
    loaded = load_weights(folder, config, expert_ids=(), dtype=torch.float32, tp_rank=1, tp_size=2)
    made = next_weights(loaded, arrived(config, hub, ()), config, version=1)
    assert storage_bytes(made) == storage_bytes(loaded)
    shared = sum(t.nbytes for name, t in hub.items() if split(name)) // 2
    assert storage_bytes(made) <= sum(t.nbytes for t in hub.values()) - shared + slack(made)


def split(name: str) -> bool:
    return name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "lm_head.weight"))


def test_a_tensor_is_given_away_once_but_for_embeddings_that_are_the_head_too(
    tiny_folders: dict[str, Path],
) -> None:
    config = read_config(tiny_folders["mixtral"])
    incoming = arrived(config, load_file(tiny_folders["mixtral"] / "model.safetensors"), ())
    incoming.read("model.norm.weight")
    with pytest.raises(KeyError):
        incoming.read("model.norm.weight")


Added = tuple[str, str, tuple[int, ...], int, memoryview]


def piece(name: str, first: int, num: int, dtype: str = "F32") -> Added:
    return name, dtype, (64,), first, memoryview(bytes(4 * num))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece("model.nonsense", 0, 64)], "tensor model.nonsense is not one of the model's"),
        ([piece(NORM, 0, 64), piece(NORM, 0, 64)], f"tensor {NORM} came twice"),
        ([piece(NORM, 0, 16), piece(NORM, 32, 32)], "row 32 of type F32 follows 16 rows"),
        ([piece(NORM, 0, 16), piece(NORM, 16, 48, "F16")], "bytes from row 16 on are no rows"),
        ([piece(NORM, 0, 65)], "260 bytes from row 0 on are no rows"),
        ([piece(NORM, 0, 64, "I8")], "tensor model.norm.weight of type I8"),
        ([piece(NORM, 0, 64)], r"and \d+ others\) is missing"),
    ],
)
def test_pieces_that_cannot_be_are_one_error(
    tiny_folders: dict[str, Path],
    pieces: list[Added],
    message: str,
) -> None:
    incoming = Incoming(Share.of(read_config(tiny_folders["mixtral"]), ()))

    def all_of_them() -> None:
        for one in pieces:
            incoming.add(*one)
        incoming.total()

    with pytest.raises(ModelError, match=message):
        all_of_them()


def test_log_probabilities_alone_are_those_of_the_naive_reading(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen3_moe"]
    config = read_config(folder)
    weights = whole(folder, config)
    logits_TV = forward_alone(config, weights, IDS).logits_SV
    wanted = torch.log_softmax(logits_TV.double(), -1)[range(9, 69), IDS[10:]].float()
    assert logprobs_alone(config, weights, IDS, 10) == wanted.tolist()


def test_rows_are_read_from_a_folder_without_the_rest(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["granitemoe"]
    hub, checkpoint = load_file(folder / "model.safetensors"), Checkpoint(folder)
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert torch.equal(checkpoint.read_rows(name, 3, 9, item=2), hub[name][2, 3:9])
    assert torch.equal(checkpoint.read_rows(name, 1, 3), hub[name][1:3])
