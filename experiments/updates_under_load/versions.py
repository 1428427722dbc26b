"""The weights of every version: a function of its number, made again by whoever needs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file

from interlace.moe.config import read_config
from interlace.moe.incoming import Incoming, Share
from interlace.moe.received_names import ReceivedNames
from interlace.moe.tensor_digests import TensorDigests
from interlace.moe.weights import Weights, load_weights, next_weights
from interlace.rollout.weights_sync.pieces import Piece, pieces_of, take_in
from interlace.rollout.weights_sync.sources import StateDict

NOISE = 0.02
BUCKET_BYTES = 1 << 20
_KEPT = 8

StateTensors = dict[str, torch.Tensor]


class Versions:
    """A model in a folder, and as many other ones of the same shape as are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_config(folder)
        self._names = ReceivedNames(self.config)
        self._first = load_file(folder / "model.safetensors")
        self._everyone = range(self.config.num_experts)
        self._made: dict[int, Weights] = {}

    @cached_property
    def _base(self) -> Weights:
        """For who computes; a trainer does not."""
        return load_weights(
            self.folder, self.config, expert_ids=self._everyone, dtype=torch.float32
        )

    def of(self, number: int) -> StateTensors:
        """All tensors under the hub's names; number 0 is what lies in the folder."""
        if number == 0:
            return dict(self._first)
        noise = torch.Generator().manual_seed(number)
        return {
            name: tensor + NOISE * torch.randn(tensor.shape, generator=noise)
            for name, tensor in self._first.items()
        }

    def buckets(self, number: int) -> Iterator[list[Piece]]:
        """As they are sent."""
        return pieces_of(StateDict(self.of(number)), self._names, BUCKET_BYTES, complete=True)

    def digest(self, number: int) -> str:
        """What `weights_digest` must be."""
        digests = TensorDigests(self._names.shapes)
        for bucket in self.buckets(number):
            take_in(digests, bucket)
        return digests.total()

    def weights(self, number: int) -> Weights:
        """On one rank that has all experts; the last few are kept."""
        if number not in self._made:
            incoming = Incoming(Share.of(self.config, self._everyone))
            for bucket in self.buckets(number):
                take_in(incoming, bucket)
            while len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            made = next_weights(self._base, incoming, self.config, version=number)
            self._made[number] = made
        return self._made[number]


def stacked(tensors: StateTensors, num_experts: int) -> StateTensors:
    """The same tensors of a Qwen3-MoE as transformers 5 holds them: a layer's experts in one."""
    found = {name: t for name, t in tensors.items() if ".mlp.experts." not in name}
    layers = sorted({n.partition(".mlp.experts.")[0] for n in tensors.keys() - found.keys()})
    for layer in layers:
        experts = [f"{layer}.mlp.experts.{number}" for number in range(num_experts)]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(
            [
                torch.cat((tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]))
                for e in experts
            ]
        )
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack(
            [tensors[f"{e}.down_proj.weight"] for e in experts]
        )
    return found
