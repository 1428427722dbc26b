"""A trainer's names: what is understood, and one error, naming tensor and cause, for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.moe.test_incoming import stacked

from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.received_names import ReceivedNames
from interlace.rollout.weights_sync.attempt import Attempt
from interlace.rollout.weights_sync.outgoing import Outgoing

Q = "model.layers.1.self_attn.q_proj.weight"
W1 = "model.layers.3.block_sparse_moe.experts.7.w1.weight"
FIRST = Attempt(number=1, version=1)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def mixtral(tiny_folders: dict[str, Path]) -> tuple[ModelConfig, Tensors]:
    folder = tiny_folders["mixtral"]
    return read_config(folder), load_file(folder / "model.safetensors")


def digest(config: ModelConfig, *parts: Tensors) -> str:
    """Of all that would be sent."""
    outgoing = Outgoing(ReceivedNames(config), 1 << 20)
    for _ in outgoing.stages(FIRST, parts, complete=len(parts) == 1):
        pass
    return outgoing.digest()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(
    mixtral: tuple[ModelConfig, Tensors], prefix: str
) -> None:
    config, hub = mixtral
    assert digest(config, {prefix + n: t for n, t in hub.items()}) == digest(config, hub)


def changed(change: Callable[[Tensors], Any]) -> Callable[[Tensors], Tensors]:
    def made(hub: Tensors) -> Tensors:
        tensors = dict(hub)
        change(tensors)
        return tensors

    return made


def with_tensor(name: str, tensor: Any) -> Callable[[Tensors], Tensors]:
    return changed(lambda tensors: tensors.update({name: tensor}))


def half_stacked(hub: Tensors) -> Tensors:
    name = "model.layers.3.mlp.experts.down_proj"
    return {**hub, name: stacked(hub)[name]}


REFUSED = [
    (changed(lambda tensors: tensors.pop(W1)), f"tensor {W1} is missing"),
    (with_tensor(Q, torch.zeros(3, 64)), f"tensor {Q} has shape [3, 64], but the model asks for"),
    (with_tensor(Q, torch.zeros(256, 64, dtype=torch.int8)), f"tensor {Q} has type int8"),
    (with_tensor("model.layers.4.x", torch.zeros(1)), "model.layers.4.x has no place in a mixtral"),
    (with_tensor("value_head.weight", torch.zeros(1)), "value_head.weight has no place"),
    (with_tensor("base_model.model.q.lora_A.weight", torch.zeros(1)), "belongs to a LoRA adapter"),
    (with_tensor(f"base_model.model.{Q}", torch.zeros(1)), "belongs to a LoRA adapter"),
    (with_tensor(f"module.{Q}", torch.zeros(256, 64)), f"tensor {Q} is there twice: as {Q} and as"),
    (half_stacked, "is there twice"),
    (with_tensor(Q, None), f"tensor {Q} is a NoneType"),
    (
        with_tensor(Q, torch.zeros(256, 64, device="meta")),
        f"tensor {Q} is sparse or has no",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_one_error_names_the_tensor_before_anything_is_sent(
    mixtral: tuple[ModelConfig, Tensors], change: Callable[[Tensors], Tensors], message: str
) -> None:
    config, hub = mixtral
    outgoing = Outgoing(ReceivedNames(config), 1 << 20)
    with pytest.raises(ModelError) as raised:
        next(outgoing.stages(FIRST, [change(hub)], complete=True))
    assert message in str(raised.value)
    assert outgoing.num_bytes == 0


def test_harmless_tensors_are_passed_over(mixtral: tuple[ModelConfig, Tensors]) -> None:
    config, hub = mixtral
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    assert digest(config, {**hub, **spare}) == digest(config, hub)


def test_a_dictionary_in_parts_is_the_whole_one(mixtral: tuple[ModelConfig, Tensors]) -> None:
    config, hub = mixtral
    names = list(hub)
    parts = [{name: hub[name] for name in names[first::3]} for first in range(3)]
    assert digest(config, *parts) == digest(config, hub)
    with pytest.raises(ModelError, match="is missing"):
        digest(config, *parts[:2])
    with pytest.raises(ModelError, match="came twice"):
        digest(config, *parts, parts[0])


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_head_that_is_tied_may_be_there_and_must_be_equal(
    mixtral: tuple[ModelConfig, Tensors], in_parts: bool
) -> None:
    config, hub = mixtral
    config = replace(config, tie_embeddings=True)

    def given(head: torch.Tensor) -> list[Tensors]:
        rest = {name: tensor for name, tensor in hub.items() if name != HEAD}
        return [{HEAD: head}, rest] if in_parts else [{HEAD: head, **rest}]

    without = {name: tensor for name, tensor in hub.items() if name != HEAD}
    assert digest(config, *given(hub[EMBED])) == digest(config, without)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        digest(config, *given(hub[EMBED] + 1))
