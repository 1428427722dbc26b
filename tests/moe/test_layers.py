"""The small parts: products, experts, routing, the cache, placements and stub answers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.moe.by_index import assert_experts_go_by_index

from interlace.comm.collectives import Exchange, Gather
from interlace.moe import kernels
from interlace.moe.config import ModelConfig
from interlace.moe.experts import Expert, apply_experts
from interlace.moe.kv_cache import KVCache, attention_planes, bytes_per_block
from interlace.moe.linear import HeadwiseLinear, Linear, padded_linear, tiled_linear
from interlace.moe.parts import Router
from interlace.moe.placement import Placement
from interlace.moe.program import echo_result, stub_result
from interlace.moe.router import padded_sigmoid, route

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(576, 960), (64, 8), (48, 80), (384, 576)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num_inputs, num_outputs = shape
    weight_NK = (torch.randn(num_outputs, num_inputs) * 0.05).to(dtype)
    linear = Linear(weight_NK)
    x_TK = torch.randn(300, num_inputs).to(dtype)
    expected = linear(x_TK)
    torch.testing.assert_close(expected, F.linear(x_TK, weight_NK))
    for count in (*range(1, 34), 63, 64, 65, 129, 256):
        assert torch.equal(linear(x_TK[5 : 5 + count]), expected[5 : 5 + count]), count
        assert torch.equal(
            padded_linear(x_TK[:count], weight_NK), padded_linear(x_TK, weight_NK)[:count]
        ), count
    assert linear(x_TK[:0]).shape == (0, num_outputs)


def test_a_product_in_tiles_is_the_product_and_the_same_for_every_number_of_rows() -> None:
    weight_NK = torch.randn(48, 80) * 0.05
    x_TK = torch.randn(200, 80)
    expected = tiled_linear(x_TK, weight_NK)
    torch.testing.assert_close(expected, F.linear(x_TK, weight_NK))
    for start, count in ((0, 1), (3, 64), (60, 65), (0, 128), (7, 150)):
        found = tiled_linear(x_TK[start : start + count], weight_NK)
        assert torch.equal(found, expected[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 48, 7])
def test_experts_are_gated_mlps_whatever_their_width(size: int, dtype: torch.dtype) -> None:
    matrices = [
        [(torch.randn(*shape) * 0.1).to(dtype) for shape in ((size, 64), (size, 64), (64, size))]
        for _ in range(3)
    ]
    experts = [Expert(gate_ID=g, up_ID=u, down_DI=d) for g, u, d in matrices]
    x_RD = torch.randn(9, 64).to(dtype)
    found = apply_experts(experts, x_RD, (5, 0, 4))
    for rows, (gate, up, down) in ((slice(0, 5), matrices[0]), (slice(5, 9), matrices[2])):
        x = x_RD[rows].double()
        expected = (F.silu(x @ gate.double().T) * (x @ up.double().T)) @ down.double().T
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[rows].double(), expected, atol=tolerance, rtol=tolerance)
    for row in range(9):
        counts = (1, 0, 0) if row < 5 else (0, 0, 1)
        assert torch.equal(apply_experts(experts, x_RD[row : row + 1], counts)[0], found[row])
    assert apply_experts(experts, x_RD[:0], (0, 0, 0)).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_in_torch_read_rows_and_write_outputs_wherever_they_lie(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)
    assert_experts_go_by_index(torch.randn, dtype)


def test_equal_experts_are_chosen_by_lowest_id() -> None:
    logits_TX = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [3.0] * 5])
    router = Router(score="softmax", top_k=3, normalise=True)
    routing = route(logits_TX, router)
    assert routing.topk_TK.tolist() == [[1, 3, 2], [0, 1, 2]]
    torch.testing.assert_close(routing.weight_TK.sum(1), torch.ones(2))
    plain = route(logits_TX, replace(router, normalise=False))
    torch.testing.assert_close(plain.weight_TK[1], torch.full((3,), 0.2))


def test_only_experts_of_the_best_groups_are_chosen_and_weights_are_without_bias() -> None:
    score_TX = torch.tensor([[0.1, 0.8, 0.3, 0.3, 0.9, 0.05]])
    router = Router(
        score="sigmoid", top_k=2, normalise=False, num_groups=3, group_score="best two", scale=2.0
    )
    logits_TX = torch.logit(score_TX)
    bias_X = torch.tensor([0.0, 0.0, 0.4, 0.4, 0.0, 0.0])
    assert route(logits_TX, replace(router, top_groups=3), bias_X).topk_TK.tolist() == [[4, 1]]
    routing = route(logits_TX, replace(router, top_groups=1), bias_X)
    assert routing.topk_TK.tolist() == [[2, 3]]
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[0.6, 0.6]]))
    best = replace(router, top_groups=1, group_score="best")
    assert route(logits_TX, best).topk_TK.tolist() == [[4, 5]]
    two = route(logits_TX, replace(best, top_groups=2, normalise=True, scale=1.0))
    torch.testing.assert_close(two.weight_TK.sum(1), torch.ones(1))


@pytest.mark.parametrize("width", [1, 8, 60, 64])
def test_a_row_of_a_padded_sigmoid_does_not_depend_on_the_number_of_rows(width: int) -> None:
    x_TX = torch.randn(70, width) * 4
    expected = padded_sigmoid(x_TX)
    torch.testing.assert_close(expected, torch.sigmoid(x_TX))
    for count in range(1, 40):
        assert torch.equal(padded_sigmoid(x_TX[3 : 3 + count]), expected[3 : 3 + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 32), (4, 24, 48), (16, 128, 512), (2, 512, 128)])
def test_a_headwise_product_depends_on_neither_rows_nor_heads(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_heads, num_inputs, num_outputs = shape
    weight_HNK = (torch.randn(num_heads, num_outputs, num_inputs) * 0.05).to(dtype)
    x_THK = torch.randn(70, num_heads, num_inputs).to(dtype)
    whole, half = HeadwiseLinear(weight_HNK), HeadwiseLinear(weight_HNK[num_heads // 2 :])
    expected = whole(x_THK)
    for head in range(num_heads):
        torch.testing.assert_close(expected[:, head], F.linear(x_THK[:, head], weight_HNK[head]))
    for count in (*range(0, 34), 63):
        rows = x_THK[5 : 5 + count]
        assert torch.equal(whole(rows), expected[5 : 5 + count]), count
        halved = half(rows[:, num_heads // 2 :])
        assert torch.equal(halved, expected[5 : 5 + count, num_heads // 2 :]), count


def test_planes_keep_what_is_written_and_blocks_are_copied_in_order() -> None:
    cache = KVCache(
        num_layers=2, num_blocks=4, planes={"latent": (1, 24), "rope": (1, 8)}, dtype=torch.float32
    )
    rows = {"latent": torch.randn(3, 1, 24), "rope": torch.randn(3, 1, 8)}
    cache.write(1, torch.tensor([70, 5, 255]), **rows)
    for name, rows_TGE in rows.items():
        plane = cache.plane(1, name)
        for row, (block, offset) in enumerate([(1, 6), (0, 5), (3, 63)]):
            assert torch.equal(plane[block, :, offset], rows_TGE[row])
        assert not cache.plane(0, name).any()
    cache.copy_blocks(())
    cache.copy_blocks(((1, 2), (0, 1)))
    latent = cache.plane(1, "latent")
    assert torch.equal(latent[2, 0, 6], rows["latent"][0, 0])
    assert torch.equal(latent[1], latent[0])
    cache.copy_blocks(((3, 0), (2, 3)))
    assert torch.equal(latent[0, 0, 63], rows["latent"][2, 0])


def test_a_block_costs_what_its_planes_hold(tiny: tuple[Path, ModelConfig]) -> None:
    config = tiny[1]
    for tp_size in (1, 2):
        cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=3,
            planes=attention_planes(config, tp_size),
            dtype=torch.bfloat16,
        )
        names = attention_planes(config)
        planes = [cache.plane(i, n) for i in range(config.num_layers) for n in names]
        held = sum(plane.nbytes for plane in planes)
        assert held == 3 * bytes_per_block(config, torch.bfloat16, tp_size)


def test_a_placement_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \[0, 2\], but the group has 2 ranks"):
        Placement(owners=(0, 2), ep_size=2)


def test_stub_answers_have_the_shape_of_real_ones() -> None:
    rows = torch.ones(3, 2)
    gather = Gather(role="tp", stage="x", payload=rows)
    assert [part is rows for part in stub_result(gather, 4)] == [True] * 4
    exchange = Exchange(role="ep", stage="x", payload=rows, send=(1, 2), recv=(2, 2))
    assert torch.equal(stub_result(exchange, 2), torch.zeros(4, 2))
    echo = echo_result(exchange, 2, 1)
    assert echo[:, 0].tolist() == [0, 0, 1, 1]
