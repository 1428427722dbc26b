"""Forward passes driven by hand: one rank alone, or several in lockstep, without any transport."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from interlace.comm.collectives import Collective, Forward, Gather
from interlace.moe.config import ModelConfig
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.dispatch_strategy import Strategy
from interlace.moe.kv_cache import KVCache, attention_planes
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.placement import Placement
from interlace.moe.weights import load_weights

Op = tuple[str, str, str]


def run_together(
    forwards: Sequence[Forward],
    groups: Mapping[str, Sequence[Sequence[int]]],
    program: list[Op] | None = None,
) -> list[Any]:
    """Every rank's result; `groups` maps a role to the groups its ranks form."""
    answers: list[Any] = [None] * len(forwards)
    while True:
        requests: list[Collective] = []
        results = []
        for forward, answer in zip(forwards, answers, strict=True):
            try:
                requests.append(forward.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not requests, "one rank returned while another still waits"
            return results
        ops = {(type(r).__name__, r.role, r.stage) for r in requests}
        assert len(ops) == 1, f"ranks want different collectives: {ops}"
        if program is not None:
            program.extend(ops)
        for members in groups[requests[0].role]:
            answer_group(requests, members, answers)


def answer_group(
    requests: Sequence[Collective], members: Sequence[int], answers: list[Any]
) -> None:
    group = [requests[member] for member in members]
    if isinstance(group[0], Gather):
        assert len({r.payload.shape for r in group}) == 1, "gathered payloads differ in shape"
        for member in members:
            answers[member] = [request.payload.clone() for request in group]
        return
    parts = [request.payload.split(list(request.send)) for request in group]
    for place, member in enumerate(members):
        received = [part[place] for part in parts]
        assert [len(rows) for rows in received] == list(group[place].recv)
        answers[member] = torch.cat(received)


def run_alone(forward: Forward, program: list[Op] | None = None) -> Any:
    """The result of a forward pass whose groups have one member."""
    return run_together([forward], {"ep": [[0]], "tp": [[0]]}, program)[0]


class Ranks:
    """All ranks of a small world with weights and caches; rank = data-parallel * tp + tp rank."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        world: int = 1,
        tp_size: int = 1,
        placement: Placement | None = None,
        num_blocks: int = 16,
        dispatch: Strategy = "all_to_all",
        waits: bool = True,
        buckets: bool = False,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.model = Model(config)
        self.tp_size = tp_size
        placement = placement or Placement.contiguous(config.num_experts, world)
        self.groups = {
            "ep": [list(range(world))],
            "tp": [list(range(i, i + tp_size)) for i in range(0, world, tp_size)],
        }
        self.weights = [
            load_weights(
                folder,
                config,
                expert_ids=placement.experts_of(rank),
                dtype=dtype,
                tp_rank=rank % tp_size,
                tp_size=tp_size,
                device=device,
            )
            for rank in range(world)
        ]
        self.contexts = [
            PathContext(
                path="test",
                tp_rank=rank % tp_size,
                tp_size=tp_size,
                ep_rank=rank,
                ep_size=world,
                kv=KVCache(
                    num_layers=config.num_layers,
                    num_blocks=num_blocks,
                    planes=attention_planes(config, tp_size),
                    dtype=dtype,
                    device=device,
                ),
                expert_placement=placement,
                dispatch=dispatch,
                waits=waits,
                buckets=buckets,
            )
            for rank in range(world)
        ]

    def forwards(self, *descriptions: Description) -> list[Forward]:
        """One forward pass of each rank, not begun; one description per data-parallel rank."""
        num_groups = len(self.groups["tp"])
        each = [*descriptions, *[Description()] * (num_groups - len(descriptions))]
        max_rows = max(description.num_rows for description in each)
        return [
            self.model.forward(weights, context, each[rank // self.tp_size], max_rows=max_rows)
            for rank, (weights, context) in enumerate(zip(self.weights, self.contexts, strict=True))
        ]

    def run(self, *descriptions: Description, program: list[Op] | None = None) -> ForwardOutput:
        """One forward pass; one description per data-parallel rank, the first one's output."""
        with torch.inference_mode():
            outputs = run_together(self.forwards(*descriptions), self.groups, program)
        for other in outputs[1 : self.tp_size]:
            assert torch.equal(other.logits_SV, outputs[0].logits_SV)
            assert torch.equal(other.experts_TLK, outputs[0].experts_TLK)
        output: ForwardOutput = outputs[0]
        return output


def describe(
    *sequences: tuple[Sequence[int], int, Sequence[int]],
    block_copies: tuple[tuple[int, int], ...] = (),
) -> Description:
    """Rows of (tokens, first position, block table) sequences; the logits of all are wanted."""
    ends = [0]
    for tokens, _, _ in sequences:
        ends.append(ends[-1] + len(tokens))
    return Description(
        input_ids=tuple(token for tokens, _, _ in sequences for token in tokens),
        positions=tuple(start + i for tokens, start, _ in sequences for i in range(len(tokens))),
        cu_seqlens_q=tuple(ends),
        block_tables=tuple(tuple(table) for _, _, table in sequences),
        sample_rows=tuple(range(ends[-1])),
        block_copies=block_copies,
    )
