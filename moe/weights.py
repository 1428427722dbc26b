"""One rank's share of a model's weights, ready to multiply with.

Shapes: D hidden, E rotated width, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .attention_block import AttentionBlock
from .checkpoint import Checkpoint
from .config import ModelConfig, check_tp_size
from .experts import Expert
from .grouped_query import GroupedQueryAttention
from .latent import LatentAttention
from .linear import Linear
from .loader import Loader, Tensors
from .mixture import MixtureLayer
from .rotary import rotary_tables
from .straight import Straight
from .tensor_names import TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer on one rank."""

    input_norm_D: torch.Tensor
    attention: GroupedQueryAttention | LatentAttention
    o: Linear
    """All heads to hidden: whole on every rank, so that no sum crosses ranks."""
    post_norm_D: torch.Tensor
    feed_forward: MixtureLayer | Expert
    """Experts, or the one gated MLP of a dense layer, which every rank has whole."""
    residual_factor: float = 1.0
    """What attention adds to the residual is multiplied with this."""
    block: AttentionBlock | None = field(init=False)
    """All of it up to the experts in one call, where our kernels do that."""

    def __post_init__(self) -> None:
        block = AttentionBlock.of(
            input_norm_D=self.input_norm_D,
            attention=self.attention,
            output=self.o,
            post_norm_D=self.post_norm_D,
            mixture=self.feed_forward,
            factor=self.residual_factor,
        )
        object.__setattr__(self, "block", block)  # as every other field: made once, never changed

    @property
    def mixture(self) -> MixtureLayer:
        """The experts of a layer that has some."""
        assert isinstance(self.feed_forward, MixtureLayer)
        return self.feed_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version on one rank. Nothing writes to it; an update is a new object."""

    version: int
    dtype: torch.dtype
    device: torch.device
    tp_rank: int
    tp_size: int
    expert_ids: tuple[int, ...]
    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head: Linear
    """This tensor-parallel rank's share of the vocabulary, padded to equal shares."""
    cos_PE: torch.Tensor
    sin_PE: torch.Tensor
    """float32 rotary tables; sin is negative in the first half of E, see `rotary.rotate`."""
    straight: Straight | None = field(init=False)
    """All layers in one call, where our kernels do that."""

    def __post_init__(self) -> None:
        straight = Straight.of([(layer.block, layer.feed_forward) for layer in self.layers])
        object.__setattr__(self, "straight", straight)


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    expert_ids: Sequence[int],
    dtype: torch.dtype,
    version: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: str | torch.device = "cpu",
) -> Weights:
    """The weights a rank needs: all that is replicated, its heads and its experts.

    Every tensor the model has, this rank's or not, is checked by name, shape and type before the
    first one is read: all ranks see the same `ModelError`. Understands the hub's layouts and
    experts stacked as transformers 5 does. Raises ValueError when `tp_size` does not divide the
    heads.
    """
    check_tp_size(config, tp_size)
    checkpoint = Checkpoint(folder)
    names = TensorNames.find(checkpoint, config)
    names.check(checkpoint)
    on = torch.device(device)
    loader = Loader(
        checkpoint, names, config, dtype=dtype, device=on, tp_rank=tp_rank, tp_size=tp_size
    )
    width = config.attention.rope_dim
    cos_PE, sin_PE = rotary_tables(config.rotary, width, config.max_positions)
    return Weights(
        version=version,
        dtype=dtype,
        device=on,
        tp_rank=tp_rank,
        tp_size=tp_size,
        expert_ids=tuple(expert_ids),
        embed_VD=loader.read(names.embed),
        layers=tuple(
            _layer(loader, names, i, expert_ids, config) for i in range(config.num_layers)
        ),
        norm_D=loader.read(names.norm),
        head=loader.head(),
        cos_PE=cos_PE.to(device),
        sin_PE=sin_PE.to(device),
    )


def next_weights(
    weights: Weights, tensors: Tensors, config: ModelConfig, *, version: int
) -> Weights:
    """The same share of the same model with other numbers; shares only the rotary tables.

    `tensors` are complete and checked, under the hub's names.
    """
    names = TensorNames.hub(config)
    loader = Loader(
        tensors,
        names,
        config,
        dtype=weights.dtype,
        device=weights.device,
        tp_rank=weights.tp_rank,
        tp_size=weights.tp_size,
    )
    made = replace(
        weights,
        version=version,
        embed_VD=loader.read(names.embed),
        layers=tuple(
            _layer(loader, names, i, weights.expert_ids, config) for i in range(config.num_layers)
        ),
        norm_D=loader.read(names.norm),
        head=loader.head(),
    )
    if weights.device.type == "cuda":
        # Made on this thread's stream; whoever uses them next does so on another one.
        torch.cuda.current_stream(weights.device).synchronize()
    return made


def _layer(
    loader: Loader,
    names: TensorNames,
    index: int,
    expert_ids: Sequence[int],
    config: ModelConfig,
) -> LayerWeights:
    layer = names.layer(index)
    return LayerWeights(
        input_norm_D=loader.read(layer["input_norm"]),
        attention=loader.attention(layer),
        o=loader.output(layer),
        post_norm_D=loader.read(layer["post_norm"]),
        feed_forward=loader.feed_forward(index, layer, expert_ids),
        residual_factor=config.multipliers.residual,
    )
