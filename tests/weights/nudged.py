"""Other weights for a model in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def nudged(folder: Path, seed: int) -> Tensors:
    """Every tensor of the folder and some noise, the same for the same seed."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise)
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    }


def saved(tensors: Tensors, model: Path, folder: Path) -> Path:
    """A folder that is `model` with these weights."""
    shutil.copytree(model, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stacked(tensors: Tensors) -> Tensors:
    """A Qwen3-MoE as transformers 5 holds it: the experts of a layer in one tensor."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        head, _, tail = name.partition(".mlp.experts.")
        if not tail:
            found[name] = tensor
        elif tail == "0.gate_proj.weight":
            of = [f"{head}.mlp.experts.{number}" for number in range(8)]
            found[f"{head}.mlp.experts.gate_up_proj"] = torch.stack(
                [
                    torch.cat((tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]))
                    for e in of
                ]
            )
            found[f"{head}.mlp.experts.down_proj"] = torch.stack(
                [tensors[f"{e}.down_proj.weight"] for e in of]
            )
    return found


def parts(tensors: Tensors, num: int) -> list[Tensors]:
    """The same in so many dictionaries."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[first::num]} for first in range(num)]
