"""Rows reach the owners of their experts and come back to the slots they left."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.driving import Op, run_together

from interlace.moe import kernels
from interlace.moe.dispatch import AllToAllDispatcher, deal, placed
from interlace.moe.placement import Placement

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 5


async def there_and_back(
    placement: Placement, rank: int, x_TD: torch.Tensor, topk_TK: torch.Tensor
) -> Any:
    """Every expert multiplies by its id plus one; returns what came back and what was counted."""
    dispatcher = AllToAllDispatcher(placement=placement, ep_rank=rank)
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    own = torch.tensor(placement.experts_of(rank), dtype=torch.long)
    expert_R = own.repeat_interleave(torch.tensor(dispatched.expert_counts, dtype=torch.long))
    y_RD = dispatched.rows_RD * (expert_R[:, None] + 1)
    return await dispatcher.combine("0", y_RD, dispatched), dispatched.expert_counts


def choose(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]


@given(
    owners=st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_every_output_comes_back_to_its_slot(owners: list[int], rows: list[int], seed: int) -> None:
    world = len(rows)
    placement = Placement(owners=tuple(owner % world for owner in owners), ep_size=world)
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, WIDTH, generator=generator) for n in rows]
    topk = [choose(n, generator) for n in rows]
    program: list[Op] = []
    results = run_together(
        [there_and_back(placement, rank, x[rank], topk[rank]) for rank in range(world)],
        {"ep": [list(range(world))]},
        program,
    )
    for rank, (y_TKD, _) in enumerate(results):
        assert torch.equal(y_TKD, x[rank][:, None] * (topk[rank][:, :, None] + 1))
    total = torch.cat(topk).flatten().bincount(minlength=NUM_EXPERTS).tolist()
    for rank, (_, counts) in enumerate(results):
        assert list(counts) == [total[expert] for expert in placement.experts_of(rank)]
    assert program == [("Exchange", "ep", f"0.{s}") for s in ("counts", "dispatch", "combine")]


@pytest.mark.skipif(kernels.native is None, reason="there is no extension")
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rows_are_dealt_out_as_in_torch(num_rows: int) -> None:
    dispatcher = AllToAllDispatcher(placement=Placement.contiguous(NUM_EXPERTS, 2), ep_rank=0)
    generator = torch.Generator().manual_seed(num_rows)
    x_TD = torch.randn(num_rows, 2 * WIDTH, generator=generator)[:, ::2]
    topk_TK = choose(num_rows, generator)
    found = deal(x_TD, topk_TK, NUM_EXPERTS)
    expected = dispatcher._pack_in_torch(x_TD, topk_TK)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    order, _, rows = found
    assert torch.equal(placed(rows, order), x_TD.repeat_interleave(TOP_K, dim=0))


@pytest.mark.skipif(kernels.native is None, reason="there is no extension")
def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    rows, one = torch.zeros(3, WIDTH), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 rows for 1 places"):
        placed(rows, one)
    with pytest.raises(ValueError, match="an id that is none of 6 experts'"):
        deal(rows[:1], one[:, None] + NUM_EXPERTS, NUM_EXPERTS)


def test_experts_are_placed_in_equal_runs() -> None:
    assert Placement.contiguous(8, 2).owners == (0, 0, 0, 0, 1, 1, 1, 1)
    assert Placement.contiguous(5, 3).owners == (0, 0, 1, 1, 2)
    assert Placement.contiguous(8, 2).experts_of(1) == (4, 5, 6, 7)
    assert Placement(owners=(1, 0, 1), ep_size=2).order == (1, 0, 2)
