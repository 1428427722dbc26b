"""What a model is made of: kinds of attention, experts and their router, rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQuery:
    """Attention whose query heads share key/value heads in equal groups."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    """Whether queries, keys and values have biases."""
    norm: Literal["none", "head", "row"]
    """Queries and keys are normalised not at all, each head by itself, or all heads at once."""
    scale: float
    """What scores are multiplied with."""

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Keys and values of all heads are projections of one latent vector a token. A rotated key, one
    for all heads, carries the position.
    """

    num_heads: int
    latent_dim: int
    query_latent_dim: int | None
    """Queries are projections of a latent of this width; None: of the hidden state."""
    nope_dim: int
    """Width of a head's query and key without position."""
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Whether the checkpoint pairs neighbours in rotation, not halves."""
    scale: float


Attention = GroupedQuery | Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a row's experts are chosen and weighted."""

    score: Literal["softmax", "sigmoid"]
    top_k: int
    normalise: bool
    """Whether the weights of the chosen experts are scaled to sum to one."""
    num_groups: int = 1
    """Experts form so many groups of neighbours, ..."""
    top_groups: int = 1
    """... and only those of the best groups can be chosen."""
    group_score: Literal["best", "best two"] = "best"
    """What makes a group good: its best expert, or the sum of its best two."""
    bias: bool = False
    """Whether a bias is added to the scores for the choice, not for the weights."""
    scale: float = 1.0
    """What the weights are multiplied with in the end."""
    precise: bool = False
    """Whether logits are computed in float32 whatever the type of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of one layer."""

    num_experts: int
    expert_size: int
    """Width of one expert's hidden layer."""
    router: Router
    shared_size: int = 0
    """Width of the expert every row goes to; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is weighted by a sigmoid of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Longer contexts by slower rotation (https://arxiv.org/abs/2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the bounds of the ramp are rounded to whole dimensions."""
    amplitude: float
    """What cosines and sines are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Longer contexts by slower rotation of low frequencies only (Llama 3.1)."""

    factor: float
    original_positions: int
    low_frequency: float
    high_frequency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions."""

    theta: float
    scaling: Yarn | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constants some models scale their activations with."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what attention and experts add to the residual."""
    logits: float = 1.0
