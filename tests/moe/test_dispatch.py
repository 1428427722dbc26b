"""Rows reach the owners of their experts and come back to the slots they left."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.by_index import experts_of_rows, in_order, sorted_rows
from tests.moe.driving import Op, run_together

from interlace.moe import kernels
from interlace.moe.dispatch import (
    AllToAllDispatcher,
    Returned,
    deal,
    order_by_expert,
    order_in_torch,
)
from interlace.moe.placement import Placement

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 5


async def there_and_back(
    placement: Placement, rank: int, x_TD: torch.Tensor, topk_TK: torch.Tensor
) -> Any:
    """Every expert multiplies by its id plus one; returns what came back and what was counted."""
    dispatcher = AllToAllDispatcher(placement=placement, ep_rank=rank)
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    expert_R = experts_of_rows(dispatched, placement, rank)
    y_RD = in_order(dispatched, sorted_rows(dispatched) * (expert_R[:, None] + 1))
    returned = await dispatcher.combine("0", y_RD, dispatched)
    return returned.in_slots(), dispatched.expert_counts


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
    rows, place_TK, _ = found
    slots_TKD = Returned(outputs_ND=rows, place_TK=place_TK).in_slots()
    assert torch.equal(slots_TKD, x_TD[:, None].expand(-1, TOP_K, -1))


@pytest.mark.skipif(kernels.native is None, reason="there is no extension")
@given(counts=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=3))
def test_rows_are_put_in_order_of_their_experts_as_in_torch(counts: list[list[int]]) -> None:
    table = torch.tensor(counts)
    expected = order_in_torch(table.flatten(), 4)
    assert torch.equal(order_by_expert(table.flatten(), 4), expected)
    expert_R = torch.cat([torch.arange(4).repeat_interleave(row) for row in table])
    assert expert_R[expected].tolist() == sorted(expert_R.tolist())


@pytest.mark.skipif(kernels.native is None, reason="there is no extension")
def test_an_expert_that_does_not_exist_is_refused_before_memory_is_touched() -> None:
    rows, one = torch.zeros(3, WIDTH), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="an id that is none of 6 experts'"):
        deal(rows[:1], one[:, None] + NUM_EXPERTS, NUM_EXPERTS)


def test_experts_are_placed_in_equal_runs() -> None:
    assert Placement.contiguous(8, 2).owners == (0, 0, 0, 0, 1, 1, 1, 1)
    assert Placement.contiguous(5, 3).owners == (0, 0, 1, 1, 2)
    assert Placement.contiguous(8, 2).experts_of(1) == (4, 5, 6, 7)
    assert Placement(owners=(1, 0, 1), ep_size=2).order == (1, 0, 2)
