"""Where every rank of a group has every row, nothing is dispatched, and no bit is another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.by_index import experts_of_rows, in_order, sorted_rows
from tests.moe.driving import Op, Ranks, describe, run_together
from tests.moe.ways import WAYS, whole

from interlace.comm.collectives import PreemptionPoint
from interlace.moe.config import read_config
from interlace.moe.description import Description
from interlace.moe.dispatch_replicated import ReplicatedDispatcher
from interlace.moe.dispatch_strategy import dispatcher_of
from interlace.moe.placement import Placement

NUM_EXPERTS, TOP_K, WIDTH = 6, 3, 5
TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
SCATTERED = Placement(owners=(1, 0, 0, 1, 1, 0, 1, 0), ep_size=2)


async def there_and_back(
    placement: Placement, rank: int, x_TD: torch.Tensor, topk_TK: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Every expert multiplies by its id plus two."""
    dispatcher = ReplicatedDispatcher(placement=placement, ep_rank=rank)
    dispatched = await dispatcher.dispatch("0", x_TD, topk_TK)
    expert_R = experts_of_rows(dispatched, placement, rank)
    y_RD = in_order(dispatched, sorted_rows(dispatched) * (expert_R[:, None] + 2))
    returned = await dispatcher.combine("0", y_RD, dispatched)
    return returned.in_slots(), dispatched.expert_counts


@given(
    owners=st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
    world=st.integers(1, 4),
    num_rows=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_every_output_reaches_its_slot_on_every_rank(
    owners: list[int], world: int, num_rows: int, seed: int
) -> None:
    placement = Placement(owners=tuple(owner % world for owner in owners), ep_size=world)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    topk = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    program: list[Op] = []
    results = run_together(
        [there_and_back(placement, rank, x, topk) for rank in range(world)],
        {"ep": [list(range(world))]},
        program,
    )
    total = topk.flatten().bincount(minlength=NUM_EXPERTS).tolist()
    for rank, (y_TKD, counts) in enumerate(results):
        assert torch.equal(y_TKD, x[:, None] * (topk[:, :, None] + 2))
        assert list(counts) == [total[expert] for expert in placement.experts_of(rank)]
    assert program == [("Gather", "ep", "0.combine")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "olmoe", "llama"]
)
def test_a_layer_has_two_collectives_and_the_bits_of_four(
    tiny_folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    config = read_config(tiny_folders[name])
    usual = Ranks(tiny_folders[name], config, dtype=dtype)
    expected = whole(usual, TOKENS)
    program: list[Op] = []
    for tp_size, placement in ((1, None), (2, None), (2, SCATTERED)):
        if placement is not None and config.num_experts != len(placement.owners):
            continue
        ranks = Ranks(
            tiny_folders[name],
            config,
            dtype=dtype,
            world=tp_size,
            tp_size=tp_size,
            placement=placement,
            dispatch="replicated",
        )
        program.clear()
        outputs = everybody(ranks, describe((TOKENS, 0, (4, 2, 7))), program=program)
        for output in outputs:
            assert torch.equal(output.logits_SV, expected.logits_SV)
            assert torch.equal(output.experts_TLK, expected.experts_TLK)
        for way in WAYS.values():
            output = way(ranks, TOKENS)
            assert torch.equal(output.logits_SV, expected.logits_SV)
            assert torch.equal(output.experts_TLK, expected.experts_TLK)
    heads = [("Gather", "tp", f"{layer}.heads") for layer in range(config.num_layers)]
    combines = [("Gather", "ep", f"{layer}.combine") for layer in config.moe_layers]
    assert sorted(program) == sorted([*heads, *combines, ("Gather", "tp", "final.logits")])


def test_one_that_is_preemptible_has_the_same_bits(tiny_folders: dict[str, Path]) -> None:
    config = read_config(tiny_folders["qwen3_moe"])
    ranks = Ranks(tiny_folders["qwen3_moe"], config, world=2, tp_size=2, dispatch="replicated")
    expected = everybody(ranks, describe((TOKENS, 0, (0, 1, 2))))
    ranks.contexts = [replace(one, preemptible=True) for one in ranks.contexts]
    found = everybody(ranks, describe((TOKENS, 0, (0, 1, 2))))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.logits_SV, other.logits_SV)


def test_groups_that_are_not_one_are_refused(tiny_folders: dict[str, Path]) -> None:
    config = read_config(tiny_folders["qwen3_moe"])
    ranks = Ranks(tiny_folders["qwen3_moe"], config, world=2, dispatch="replicated")
    forward = ranks.model.forward(
        ranks.weights[0], ranks.contexts[0], describe((TOKENS[:3], 0, (0,)))
    )
    with pytest.raises(ValueError, match="where rows are replicated both are one group"):
        forward.send(None)
    placement = Placement.contiguous(8, 2)
    with pytest.raises(ValueError, match="cannot go without waiting: choose fixed or gather"):
        dispatcher_of("replicated", placement=placement, ep_rank=0, capacity=1, waits=False)


class _Through:
    """A pass whose preemption points are passed over."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def send(self, answer: Any) -> Any:
        request = self._forward.send(answer)
        while isinstance(request, PreemptionPoint):
            request = self._forward.send(None)
        return request


def everybody(
    ranks: Ranks, description: Description, program: list[Op] | None = None
) -> Sequence[Any]:
    """Every rank's output."""
    with torch.inference_mode():
        forwards: Any = [_Through(forward) for forward in ranks.forwards(description)]
        return run_together(forwards, ranks.groups, program)
