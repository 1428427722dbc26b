"""A model whose numbers show any mixed-up message, row or block: integers, hashed at every turn.

It has the shape of the real one (attention over a block table, optionally over a tensor-parallel
group; a router; dispatch and combine) and costs microseconds. `expected` computes the tokens of a
turn directly, without communication, blocks or batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.collectives import Collective, Exchange, Gather, perform
from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput

NUM_LAYERS, NUM_EXPERTS, VOCAB, BLOCK_SIZE = 2, 8, 97, 4
EXPERT_SHAPE = (NUM_LAYERS, 1)


def mix(*values: torch.Tensor | int) -> torch.Tensor:
    """One 64-bit hash of all values, elementwise; order matters."""
    total = torch.tensor(0x1E3779B97F4A7C15)
    for value in values:
        total = (total ^ value) * 0x5851F42D4C957F2D
        total = total ^ (total >> 29)
    return total


def expected(prompt: Sequence[int], num_new: int, *, tp: int = 1) -> list[int]:
    """The greedy tokens of one turn."""
    tokens = list(prompt)
    for _ in range(num_new):
        keys = mix(torch.tensor(tokens), torch.arange(len(tokens)))
        value = _attended(keys)
        for layer in range(NUM_LAYERS):
            if tp > 1:
                value = mix(*(mix(part, layer, value) for part in range(tp)))
            value = mix(value % NUM_EXPERTS, layer, value)
        tokens.append(int(value % VOCAB))
    return tokens[len(prompt) :]


def _attended(keys: torch.Tensor) -> torch.Tensor:
    return mix(keys, torch.arange(len(keys))).sum()


class SmallModel:
    """One rank's share: its own KV pool, and the experts e with e mod ranks = rank."""

    def __init__(self, *, rank: int, world: int, tp: int, num_blocks: int) -> None:
        self.rank, self.world, self.tp = rank, world, tp
        self.max_rows: list[int] = []
        """What every forward pass was told about the largest batch of any rank."""
        self._kv = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.int64)

    async def forward(
        self, weights: Any, context: Any, description: Description, *, max_rows: int = 0
    ) -> ForwardOutput:
        """The same collectives in the same order for every batch, the empty one included.

        `context` is the name of the path.
        """
        self.max_rows.append(max_rows)
        values = self._attend(description)
        experts = []
        for layer in range(NUM_LAYERS):
            if self.tp > 1:
                view = mix(self.rank % self.tp, layer, values)
                views = await perform(Gather(role="tp", stage=f"{layer}.views", payload=view))
                values = mix(*views)
            expert_T = values % NUM_EXPERTS
            experts.append(expert_T)
            home_T = expert_T % self.world
            order_T = torch.argsort(home_T, stable=True)
            send = torch.bincount(home_T, minlength=self.world)
            table = await perform(Gather(role="ep", stage=f"{layer}.counts", payload=send))
            out = tuple(send.tolist())
            back = tuple(int(counts[self.rank]) for counts in table)
            arrived = await self._exchange(f"{layer}.dispatch", values[order_T], out, back)
            answers = mix(arrived % NUM_EXPERTS, layer, arrived)
            # Only the experts of this rank are its to compute.
            answers = torch.where(arrived % NUM_EXPERTS % self.world == self.rank, answers, 0)
            values = values.clone()
            values[order_T] = await self._exchange(f"{layer}.combine", answers, back, out)
        return self._output(values, experts, description)

    def nothing(self, description: Description) -> ForwardOutput:
        """Zeros in the shape of an output, for a forward pass that leaves early."""
        values = torch.zeros(description.num_rows, dtype=torch.int64)
        return self._output(values, [values] * NUM_LAYERS, description)

    async def _exchange(
        self, stage: str, rows: torch.Tensor, send: tuple[int, ...], recv: tuple[int, ...]
    ) -> torch.Tensor:
        answer: torch.Tensor = await perform(
            Exchange(role="ep", stage=stage, payload=rows, send=send, recv=recv)
        )
        return answer

    def _attend(self, description: Description) -> torch.Tensor:
        for source, target in description.block_copies:
            self._kv[target] = self._kv[source]
        ids, positions = torch.tensor([description.input_ids, description.positions]).long()
        keys = mix(ids, positions)
        values = torch.zeros_like(keys)
        for table, (start, stop) in zip(
            description.block_tables, itertools.pairwise(description.cu_seqlens_q), strict=True
        ):
            for row in range(start, stop):
                at = description.positions[row]
                self._kv[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = keys[row]
                values[row] = _attended(self._kv[list(table)].view(-1)[: at + 1])
        return values

    def _output(
        self, values: torch.Tensor, experts: Sequence[torch.Tensor], description: Description
    ) -> ForwardOutput:
        sampled = values[list(description.sample_rows)] % VOCAB
        logits = torch.nn.functional.one_hot(sampled, VOCAB).float() * 50
        chosen = torch.stack(list(experts), dim=1).to(torch.uint8).unsqueeze(-1)
        return ForwardOutput(logits_SV=logits, experts_TLK=chosen)


def stub_result(request: Collective, size: int) -> Any:
    """The answer of a group in which nobody has rows."""
    return [request.payload] * size if isinstance(request, Gather) else request.payload[:0]
