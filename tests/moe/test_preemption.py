"""A forward pass that offers to stand aside computes the same bits with the same collectives."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.driving import Op, Ranks, describe

from interlace.comm.collectives import Forward, PreemptionPoint
from interlace.moe.config import read_config
from interlace.moe.dispatch_strategy import Strategy
from interlace.moe.mixture import PIECE_ROWS, pieces_of

TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]


class Counted:
    """A model whose forward passes pass over their preemption points, which are counted."""

    def __init__(self, model: Any) -> None:
        self.model, self.num_points = model, 0

    def forward(self, *args: Any, **more: Any) -> Any:
        return _Straight(self, self.model.forward(*args, **more))


class _Straight:
    def __init__(self, counted: Counted, forward: Forward) -> None:
        self.counted, self.forward = counted, forward

    def send(self, value: Any) -> Any:
        request = self.forward.send(value)
        while isinstance(request, PreemptionPoint):
            self.counted.num_points += 1
            request = self.forward.send(None)
        return request


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "dispatch", "tp_size"),
    [
        ("qwen3_moe", "all_to_all", 1),
        ("mixtral", "gather", 2),
        ("deepseek_v3", "fixed", 2),
        ("llama", "all_to_all", 1),
    ],
)
def test_pieces_give_the_bits_of_the_whole_and_the_same_collectives(
    tiny_folders: dict[str, Path], name: str, dispatch: Strategy, tp_size: int, dtype: torch.dtype
) -> None:
    folder = tiny_folders[name]
    config = read_config(folder)
    programs: list[list[Op]] = [[], []]
    outputs = []
    for program, preemptible in zip(programs, (False, True), strict=True):
        ranks = Ranks(folder, config, dtype=dtype, world=2, tp_size=tp_size, dispatch=dispatch)
        ranks.contexts = [replace(one, preemptible=preemptible) for one in ranks.contexts]
        ranks.model = counted = Counted(ranks.model)  # type: ignore[assignment]
        outputs.append(ranks.run(describe((TOKENS, 0, (0, 1, 2))), program=program))
        few = ranks.run(describe((TOKENS[:3], 150, (0, 1, 2))))
        assert (counted.num_points >= config.num_layers) == preemptible
        outputs.append(few)
    for one, other in ((outputs[0], outputs[2]), (outputs[1], outputs[3])):
        assert torch.equal(one.logits_SV, other.logits_SV)
        assert torch.equal(one.experts_TLK, other.experts_TLK)
    assert programs[0] == programs[1]


@given(st.lists(st.integers(0, 100), max_size=20))
def test_pieces_are_small_and_leave_no_row_out(counts: list[int]) -> None:
    rows = [(expert, row) for expert, count in enumerate(counts) for row in range(count)]
    taken: list[int] = []
    pieces = pieces_of(counts, PIECE_ROWS)
    for piece in pieces:
        assert piece.rows.start == len(taken)
        experts = range(len(counts))[piece.experts]
        for expert, count in zip(experts, piece.counts, strict=True):
            taken += [expert] * count
        assert piece.rows.stop == len(taken)
        assert 0 < sum(piece.counts) <= PIECE_ROWS
    assert taken == [expert for expert, _ in rows]
    assert all(sum(a.counts) + sum(b.counts) > PIECE_ROWS for a, b in pairwise(pieces))
