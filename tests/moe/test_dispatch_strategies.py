"""Every strategy brings rows to their experts and outputs to their slots, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.by_index import experts_of_rows, in_order, sorted_rows
from tests.moe.driving import Op, Ranks, describe, run_together
from tests.moe.ways import WAYS, whole

from interlace.comm.collectives import Collective, Exchange
from interlace.comm.sequencer import record_program
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.description import Description
from interlace.moe.dispatch_fixed import FixedDispatcher
from interlace.moe.dispatch_labels import places
from interlace.moe.dispatch_strategy import Strategy, dispatcher_of
from interlace.moe.placement import Placement
from interlace.moe.program import stub_result

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 5
STRATEGIES: tuple[Strategy, ...] = ("all_to_all", "fixed", "gather")
STAGES = {
    "all_to_all": [("Exchange", s) for s in ("counts", "dispatch", "combine")],
    "fixed": [("Exchange", "dispatch"), ("Exchange", "combine")],
    "gather": [("Gather", "dispatch"), ("Exchange", "combine")],
}
TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
SCATTERED = Placement(owners=(1, 0, 0, 1, 1, 0, 1, 0), ep_size=2)


async def there_and_back(
    strategy: Strategy,
    placement: Placement,
    rank: int,
    x_TD: torch.Tensor,
    topk_TK: torch.Tensor,
    capacity: int,
) -> Any:
    """Every expert multiplies by its id plus two; returns what came back and what was counted."""
    dispatcher = dispatcher_of(strategy, placement=placement, ep_rank=rank, capacity=capacity)
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    expert_R = experts_of_rows(dispatched, placement, rank)
    rows_RD = sorted_rows(dispatched)
    assert len(expert_R) == len(rows_RD), "only rows that were routed here are computed"
    y_RD = in_order(dispatched, rows_RD * (expert_R[:, None] + 2))
    returned = await dispatcher.combine("0", y_RD, dispatched)
    return returned.in_slots(), dispatched.expert_counts


async def there_and_back_padded(
    strategy: Strategy,
    placement: Placement,
    rank: int,
    x_TD: torch.Tensor,
    topk_TK: torch.Tensor,
    capacity: int,
) -> torch.Tensor:
    """The same where the host does not know who got which rows: every expert multiplies all."""
    dispatcher = dispatcher_of(
        strategy, placement=placement, ep_rank=rank, capacity=capacity, waits=False
    )
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    own = torch.tensor(placement.experts_of(rank), dtype=torch.long)
    y_XND = (dispatched.rows_ND * (own[:, None, None] + 2)).to(x_TD.dtype)
    return (await dispatcher.combine("0", y_XND, dispatched)).in_slots()


@given(
    strategy=st.sampled_from(STRATEGIES),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    owners=st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    spare=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_every_output_comes_back_to_its_slot(
    strategy: Strategy,
    dtype: torch.dtype,
    owners: list[int],
    rows: list[int],
    spare: int,
    seed: int,
) -> None:
    world = len(rows)
    placement = Placement(owners=tuple(owner % world for owner in owners), ep_size=world)
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in rows]
    topk = [torch.rand(n, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K] for n in rows]
    program: list[Op] = []
    results = run_together(
        [
            there_and_back(strategy, placement, rank, x[rank], topk[rank], max(rows) + spare)
            for rank in range(world)
        ],
        {"ep": [list(range(world))]},
        program,
    )
    for rank, (y_TKD, _) in enumerate(results):
        assert torch.equal(y_TKD, x[rank][:, None] * (topk[rank][:, :, None] + 2))
    total = torch.cat(topk).flatten().bincount(minlength=NUM_EXPERTS).tolist()
    for rank, (_, counts) in enumerate(results):
        assert list(counts) == [total[expert] for expert in placement.experts_of(rank)]
    assert program == [(kind, "ep", f"0.{stage}") for kind, stage in STAGES[strategy]]
    if strategy == "all_to_all":
        return
    padded_program: list[Op] = []
    padded = run_together(
        [
            there_and_back_padded(strategy, placement, rank, x[rank], topk[rank], max(rows) + spare)
            for rank in range(world)
        ],
        {"ep": [list(range(world))]},
        padded_program,
    )
    assert padded_program == program
    for found, (y_TKD, _) in zip(padded, results, strict=True):
        assert torch.equal(found, y_TKD)


def test_the_sizes_of_fixed_are_known_before_any_row_is_routed() -> None:
    placement = Placement(owners=(0, 1, 1, 1, 1, 1), ep_size=2)
    sizes = []
    for num_rows in (0, 4):
        topk_TK = torch.tensor([[2, 0, 4]] * num_rows, dtype=torch.long).view(num_rows, TOP_K)
        dispatcher = FixedDispatcher(placement=placement, ep_rank=0, capacity=4)
        forward = there_and_back_of(dispatcher, torch.ones(num_rows, WIDTH), topk_TK)
        answer, requests = None, []
        while True:
            try:
                request: Collective = forward.send(answer)
            except StopIteration:
                break
            requests.append(request)
            answer = stub_result(request, 2)
        sizes.append([(r.payload.shape, r.send, r.recv) for r in requests])
    assert sizes[0] == sizes[1]
    # one expert here answers at most one slot a row, five there at most three
    assert [(send, recv) for _, send, recv in sizes[0]] == [((4, 4), (4, 4)), ((4, 4), (4, 12))]


async def there_and_back_of(
    dispatcher: FixedDispatcher, x_TD: torch.Tensor, topk_TK: torch.Tensor
) -> torch.Tensor:
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    y_RD = in_order(dispatched, sorted_rows(dispatched))
    return (await dispatcher.combine("0", y_RD, dispatched)).in_slots()


@pytest.mark.parametrize("strategy", ["fixed", "gather"])
def test_every_size_of_a_padded_dispatch_is_known_before_any_row_is_routed(
    strategy: Strategy,
) -> None:
    placement = Placement(owners=(0, 1, 1, 1, 1, 1), ep_size=2)
    sizes = []
    for chosen in ([2, 0, 4], [0, 1, 5], [1, 2, 3]):
        topk_TK = torch.tensor([chosen] * 3)
        x_TD = torch.ones(3, WIDTH)
        forward = there_and_back_padded(strategy, placement, 0, x_TD, topk_TK, 4)
        answer, requests = None, []
        while True:
            try:
                request: Collective = forward.send(answer)
            except StopIteration:
                break
            requests.append(request)
            answer = stub_result(request, 2)
        back = requests[1]
        assert isinstance(back, Exchange)
        sizes.append((requests[0].payload.shape, back.payload.shape, back.send, back.recv))
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0][2:] == ((4, 4), (4, 12))


def test_a_row_of_fixed_goes_only_to_members_that_need_it_and_leads_their_block() -> None:
    placement = Placement(owners=(0, 0, 1, 1, 2, 2), ep_size=3)
    x_TD = torch.arange(1.0, 4.0)[:, None].expand(3, WIDTH)
    topk_TK = torch.tensor([[2, 3], [0, 2], [1, 0]])
    dispatcher = FixedDispatcher(placement=placement, ep_rank=0, capacity=3)
    request: Collective = dispatcher.dispatch("0", x_TD, topk_TK).send(None)
    blocks = request.payload[:, 0].view(3, 3).tolist()
    assert blocks == [[2.0, 3.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("strategy", ["fixed", "gather"])
def test_more_rows_than_were_agreed_are_refused_before_anything_is_sent(
    strategy: Strategy,
) -> None:
    placement = Placement.contiguous(NUM_EXPERTS, 2)
    dispatcher = dispatcher_of(strategy, placement=placement, ep_rank=0, capacity=2)
    topk_TK = torch.zeros((3, TOP_K), dtype=torch.long)
    with pytest.raises(ValueError, match=r"3 rows are to be dispatched, .* agreed on at most 2"):
        dispatcher.dispatch("0", torch.zeros(3, WIDTH), topk_TK).send(None)


def test_places_skip_what_a_block_does_not_use() -> None:
    like = torch.zeros(0)
    assert places((2, 0, 1), (3, 2, 2), like).tolist() == [0, 1, 5]
    assert places((0, 0), (0, 4), like).tolist() == []


WORLDS = {
    "one rank": (1, 1, None),
    "two data-parallel": (2, 1, None),
    "experts scattered": (2, 1, SCATTERED),
    "two tensor-parallel": (2, 2, None),
    "four ranks": (4, 1, None),
    "two by two": (4, 2, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["fixed", "gather"])
def test_every_strategy_gives_the_bits_of_a_whole_prefill_on_one_rank(
    strategy: Strategy, dtype: torch.dtype, tiny_folders: dict[str, Path]
) -> None:
    folder = tiny_folders["qwen3_moe"]
    config = read_config(folder)
    expected = whole(Ranks(folder, config, dtype=dtype), TOKENS)
    for world, (size, tp_size, placement) in WORLDS.items():
        ranks = Ranks(
            folder,
            config,
            dtype=dtype,
            world=size,
            tp_size=tp_size,
            placement=placement,
            dispatch=strategy,
        )
        for name in ("chunks of 33", "decoded beside others"):
            found = WAYS[name](ranks, TOKENS)
            assert torch.equal(found.experts_TLK, expected.experts_TLK), (world, name)
            assert torch.equal(found.logits_SV, expected.logits_SV), (world, name)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_program_is_recorded_without_rows_and_without_a_bound(
    strategy: Strategy, tp_size: int, tiny: tuple[Path, ModelConfig]
) -> None:
    ranks = Ranks(*tiny, world=2, tp_size=tp_size, dispatch=strategy)
    walked: list[Op] = []
    ranks.run(describe((TOKENS[:3], 0, (0,))), program=walked)
    forward = ranks.model.forward(ranks.weights[0], ranks.contexts[0], Description())
    with torch.inference_mode():
        recorded = record_program(forward, {"ep": 2, "tp": tp_size}, stub_result)
    assert [(op.kind, op.role, op.stage) for op in recorded] == walked
    of_experts = [(kind, stage) for kind, role, stage in walked if role == "ep"]
    assert of_experts == [
        (kind, f"{layer}.{stage}")
        for layer in ranks.config.moe_layers
        for kind, stage in STAGES[strategy]
    ]
