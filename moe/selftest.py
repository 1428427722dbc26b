"""Whether this machine keeps the promise: equal bits however a sequence is cut and batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .config import ModelConfig
from .context import PathContext
from .description import Description
from .kv_cache import BLOCK_SIZE, KVCache, attention_planes
from .model import ForwardOutput, Model
from .placement import Placement
from .program import echo_result
from .weights import Weights

NUM_TOKENS = 70
"""More than one KV block, no multiple of anything."""
NUM_DECODED = 3
CHUNK = 7
LAYERS_OF_A_KIND = 2
"""Layers of a kind have the same shapes, so kernels are tried as well by few as by many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessReport:
    """Which ways of running one sequence differ from running it whole; empty when exact."""

    differing: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not self.differing


def exactness(
    model: Model, weights: Weights, *, placement: Placement, ep_rank: int = 0
) -> ExactnessReport:
    """Try whole, chunked and batched decoding of one sequence on this rank's weights, alone.

    Compares logits and chosen experts bit by bit. Other ranks are not asked: their experts and
    heads count as zero, which changes the numbers but not which kernels see how many rows. Uses the
    first layers of each kind, the head and a cache of its own; takes well under a second for a
    small model. To be run under inference mode with the threads that will be used.
    """
    few = _Alone(model.config, weights, placement, ep_rank)
    token_ids = [(7919 * i + 1) % model.config.vocab_size for i in range(2 * NUM_TOKENS)]
    tokens, neighbour = token_ids[:NUM_TOKENS], token_ids[NUM_TOKENS:]
    whole = few.run(few.fresh_cache(), [(tokens, 0)])
    ways = {
        f"chunks of {CHUNK}": few.run_chunks(tokens, CHUNK),
        "decoded beside another": few.run_decode(tokens, neighbour),
    }
    return ExactnessReport(
        differing=tuple(name for name, output in ways.items() if not _same(whole, output))
    )


def _few_layers(config: ModelConfig) -> list[int]:
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    return sorted((*dense[:LAYERS_OF_A_KIND], *config.moe_layers[:LAYERS_OF_A_KIND]))


def _same(left: ForwardOutput, right: ForwardOutput) -> bool:
    return torch.equal(left.logits_SV, right.logits_SV) and torch.equal(
        left.experts_TLK, right.experts_TLK
    )


class _Alone:
    """One rank's forward passes with nobody to answer.

    A tensor-parallel group is filled with copies: every rank's share of the rows is the same
    sequences again, in other blocks, so that gathering rows gives back what this rank sent.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, placement: Placement, ep_rank: int
    ) -> None:
        layers = _few_layers(config)
        moe_layers = tuple(i for i, layer in enumerate(layers) if layer in config.moe_layers)
        self._model = Model(replace(config, num_layers=len(layers), moe_layers=moe_layers))
        self._weights = replace(weights, layers=tuple(weights.layers[i] for i in layers))
        self._placement = placement
        self._ep_rank = ep_rank
        self._blocks_per_sequence = -(-NUM_TOKENS // BLOCK_SIZE)

    def fresh_cache(self) -> KVCache:
        return KVCache(
            num_layers=self._model.config.num_layers,
            num_blocks=2 * self._blocks_per_sequence * self._weights.tp_size,
            planes=attention_planes(self._model.config, self._weights.tp_size),
            dtype=self._weights.dtype,
            device=self._weights.device,
        )

    def run_chunks(self, tokens: Sequence[int], size: int) -> ForwardOutput:
        cache = self.fresh_cache()
        starts = range(0, len(tokens), size)
        return _joined([self.run(cache, [(tokens[a : a + size], a)]) for a in starts])

    def run_decode(self, tokens: Sequence[int], neighbour: Sequence[int]) -> ForwardOutput:
        """All but the last tokens at once beside a shorter sequence, then both token by token."""
        cache, first, lag = self.fresh_cache(), len(tokens) - NUM_DECODED, len(tokens) // 2
        outputs = [self.run(cache, [(tokens[:first], 0), (neighbour[: first - lag], 0)], first)]
        for at in range(first, len(tokens)):
            both = [(tokens[at : at + 1], at), (neighbour[at - lag : at - lag + 1], at - lag)]
            outputs.append(self.run(cache, both, 1))
        return _joined(outputs)

    def run(
        self,
        cache: KVCache,
        sequences: Sequence[tuple[Sequence[int], int]],
        wanted: int | None = None,
    ) -> ForwardOutput:
        """Forward (tokens, first position) of each sequence; returns the `wanted` first rows."""
        tp_size = self._weights.tp_size
        described = self._describe(list(sequences) * tp_size)
        context = PathContext(
            path="self-test",
            tp_rank=self._weights.tp_rank,
            tp_size=tp_size,
            ep_rank=self._ep_rank,
            ep_size=self._placement.ep_size,
            kv=cache,
            expert_placement=self._placement,
        )
        output = self._drive(context, described)
        count = len(sequences[0][0]) if wanted is None else wanted
        return ForwardOutput(
            logits_SV=output.logits_SV[:count], experts_TLK=output.experts_TLK[:count]
        )

    def _describe(self, sequences: Sequence[tuple[Sequence[int], int]]) -> Description:
        width = self._blocks_per_sequence
        ends = [0]
        for tokens, _ in sequences:
            ends.append(ends[-1] + len(tokens))
        return Description(
            input_ids=tuple(token for tokens, _ in sequences for token in tokens),
            positions=tuple(start + i for tokens, start in sequences for i in range(len(tokens))),
            cu_seqlens_q=tuple(ends),
            block_tables=tuple(
                tuple(range(i * width, (i + 1) * width)) for i in range(len(sequences))
            ),
            sample_rows=tuple(range(ends[-1])),
        )

    def _drive(self, context: PathContext, description: Description) -> ForwardOutput:
        ranks = {
            "tp": (context.tp_size, context.tp_rank),
            "ep": (context.ep_size, context.ep_rank),
        }
        forward = self._model.forward(self._weights, context, description)
        answer = None
        while True:
            try:
                request = forward.send(answer)
            except StopIteration as stop:
                output: ForwardOutput = stop.value
                return output
            answer = echo_result(request, *ranks[request.role])


def _joined(outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    return ForwardOutput(
        logits_SV=torch.cat([output.logits_SV for output in outputs]),
        experts_TLK=torch.cat([output.experts_TLK for output in outputs]),
    )
