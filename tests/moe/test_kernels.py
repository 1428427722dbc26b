"""Our own kernels: as accurate as what they replace, and blind to the rest of the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.moe.driving import Ranks
from tests.moe.ways import WAYS, whole

from interlace.moe import kernels
from interlace.moe.alone import forward_alone
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.dispatch import Returned
from interlace.moe.ends import End
from interlace.moe.experts import Expert, apply_experts
from interlace.moe.linear import HeadwiseLinear, Linear, padded_linear
from interlace.moe.mixture import MixtureLayer, weighted_sum
from interlace.moe.model import Model
from interlace.moe.naive import naive_forward
from interlace.moe.norm import add, add_and_norm, rms_norm
from interlace.moe.parts import Mixture, Router
from interlace.moe.placement import Placement
from interlace.moe.router import route, route_in_torch
from interlace.moe.selftest import exactness
from interlace.moe.weights import load_weights

built = pytest.mark.skipif(not kernels.instructions(), reason="no kernels run here")

ULP = {torch.bfloat16: 2**-8, torch.float32: 2**-24}
"""What rounding changes of a number at most, as a share of it."""
COUNTS = (*range(1, 71), 100, 128, 200, 256, 300)
SHAPES = [(512, 768), (512, 16), (64, 33), (80, 48), (2, 1), (1026, 100), (48, 320)]


class Noise:
    """Random tensors of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return (torch.randn(shape, generator=generator) * scale).to(self._dtype)


@pytest.fixture
def noise(dtype: torch.dtype) -> Noise:
    return Noise(dtype)


def mean_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().mean())


@built
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_product_is_the_same_for_every_number_of_rows(
    noise: Noise, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    num_inputs, num_outputs = shape
    half_NK, half_TK = noise(num_outputs, num_inputs // 2), noise(310, num_inputs // 2)
    # All that is left of these sums is their rounding: another order is another number.
    linear = kernels.PackedWeight(torch.cat((half_NK, -half_NK.flip(1)), dim=1))
    x_TK = torch.cat((half_TK, half_TK.flip(1)), dim=1)
    expected = linear(x_TK)
    assert bool(expected.any()) == (num_inputs > 2 or dtype == torch.float32)
    for count in COUNTS:
        assert torch.equal(linear(x_TK[7 : 7 + count]), expected[7 : 7 + count]), count
    assert linear(x_TK[:0]).shape == (0, num_outputs)


@built
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_as_accurate_as_that_of_torch(noise: Noise, shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    weight_NK, x_TK = noise(num_outputs, num_inputs), noise(40, num_inputs)
    exact = x_TK.double() @ weight_NK.double().T
    found = kernels.PackedWeight(weight_NK)(x_TK)
    in_torch = mean_error(padded_linear(x_TK, weight_NK), exact)
    assert mean_error(found, exact) <= 1.001 * in_torch
    assert ((found.double() - exact).abs() <= 2 * ULP[found.dtype] * exact.abs() + 1e-4).all()


@built
def test_a_product_reads_rows_and_weights_wherever_they_lie(noise: Noise) -> None:
    weight_NK, rows = noise(64, 96), noise(9, 400)
    linear = kernels.PackedWeight(weight_NK.T.contiguous().T)
    expected = kernels.PackedWeight(weight_NK)(rows[:, 4:100].contiguous())
    assert torch.equal(linear(rows[:, 4:100]), expected)
    assert torch.equal(linear(rows[:, 4:100].T.contiguous().T), expected)


@built
@pytest.mark.parametrize("num_inputs", [63, 64])
def test_a_linear_is_packed_if_inputs_fill_words(
    noise: Noise, dtype: torch.dtype, num_inputs: int
) -> None:
    weight_NK, x_TK = noise(32, num_inputs), noise(5, num_inputs)
    assert kernels.can_pack(weight_NK) == (num_inputs == 64 or dtype == torch.float32)
    assert not kernels.can_pack(weight_NK.double())
    torch.testing.assert_close(Linear(weight_NK)(x_TK), F.linear(x_TK, weight_NK))


@built
def test_experts_are_as_accurate_as_those_of_torch(
    noise: Noise, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [(noise(96, 64, scale=0.2), noise(96, 64), noise(64, 96)) for _ in range(2)]
    matrices[1] = (noise(96, 64, scale=0.5), noise(96, 64, scale=2.0), noise(64, 96))
    x_RD, counts = noise(50, 64), (17, 33)
    exact = torch.cat(
        [
            (F.silu(x @ g.double().T) * (x @ u.double().T)) @ d.double().T
            for (g, u, d), x in zip(matrices, x_RD.double().split(counts), strict=True)
        ]
    )

    def apply() -> torch.Tensor:
        experts = [Expert(gate_ID=g, up_ID=u, down_DI=d) for g, u, d in matrices]
        return apply_experts(experts, x_RD, counts)

    found = apply()
    monkeypatch.setattr(kernels, "native", None)
    margin = 1.0 if dtype == torch.bfloat16 else 1.02
    assert mean_error(found, exact) <= margin * mean_error(apply(), exact)


@built
@pytest.mark.parametrize("width", [32, 48, 512])
def test_a_row_of_an_expert_does_not_depend_on_the_others(noise: Noise, width: int) -> None:
    experts = [
        Expert(gate_ID=noise(width, 128), up_ID=noise(width, 128), down_DI=noise(128, width))
        for _ in range(3)
    ]
    x_RD = noise(230, 128)
    expected = apply_experts(experts, x_RD, (120, 0, 110))
    for start, end in ((0, 1), (3, 50), (119, 121), (100, 230), (120, 127)):
        first = max(0, min(end, 120) - start)
        counts = (first, 0, end - start - first)
        assert torch.equal(apply_experts(experts, x_RD[start:end], counts), expected[start:end])
    assert torch.equal(experts[0](x_RD[:120]), expected[:120])


@built
def test_outputs_without_room_are_refused(noise: Noise) -> None:
    expert = Expert(gate_ID=noise(32, 64), up_ID=noise(32, 64), down_DI=noise(64, 32))
    for out in (noise(3, 64), noise(4, 48)):
        with pytest.raises(ValueError, match=f"4 outputs of 64, but there is room for {len(out)}"):
            apply_experts((expert,), noise(4, 64), (4,), out_ND=out)


@built
def test_rows_that_do_not_fit_a_weight_are_refused(noise: Noise, dtype: torch.dtype) -> None:
    expert = Expert(gate_ID=noise(32, 64), up_ID=noise(32, 64), down_DI=noise(64, 32))
    (other,) = {*kernels.DTYPES} - {dtype}
    for rows in (noise(3, 64), noise(4, 62), noise(4, 64).to(other)):
        with pytest.raises(ValueError, match=f"the experts get 4 rows of 64 in {dtype}"):
            apply_experts((expert,), rows, (4,))
    for rows in (noise(3, 62), noise(3, 64).to(other)):
        with pytest.raises(ValueError, match=f"the weight has 64 inputs in {dtype}"):
            Linear(noise(8, 64))(rows)


@built
def test_a_size_that_no_element_has_is_refused() -> None:
    with pytest.raises(ValueError, match="an element of 8 bytes; there are kernels for 2 and 4"):
        kernels.native.mix(8, 0, 0, 0, 0, 0, 0, 0, 0, 1.0)


@built
def test_a_gate_of_any_size_is_finite_or_not_as_in_torch(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4, 3e38]).to(dtype)
    weight = torch.zeros(32, 64, dtype=dtype)
    weight[:8, 0] = gate
    one = torch.zeros(1, 64, dtype=dtype)
    one[0, :2] = 1
    up = torch.zeros(32, 64, dtype=dtype)
    up[:, 1] = 1
    down = F.pad(torch.eye(32, dtype=dtype), (0, 0, 0, 32))
    expert = Expert(gate_ID=weight, up_ID=up, down_DI=down)
    limits = {"rtol": max(ULP[dtype], 1e-5), "atol": 1e-30}
    torch.testing.assert_close(expert(one)[0, :8], F.silu(gate.float()).to(dtype), **limits)
    one[0, 0] = torch.nan
    assert expert(one)[0, 2].isnan()


@built
@pytest.mark.parametrize("width", [64, 512])
def test_norms_are_exact_but_for_their_rounding(
    noise: Noise, dtype: torch.dtype, width: int
) -> None:
    x_TD, y_TD, weight_D = noise(21, width, scale=3.0), noise(21, width), noise(width)
    found = rms_norm(x_TD, weight_D, 1e-6)
    x = x_TD.double()
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight_D.double()
    limit = 1.01 if dtype == torch.bfloat16 else 2.5
    assert mean_error(found, exact) <= limit * mean_error(exact.to(dtype), exact)
    total, normal = add_and_norm(x_TD, y_TD, weight_D, factor=1.0, eps=1e-6)
    assert torch.equal(total, x_TD + y_TD)
    assert torch.equal(normal, rms_norm(total, weight_D, 1e-6))
    half, _ = add_and_norm(x_TD, y_TD, weight_D, factor=0.5, eps=1e-6)
    assert torch.equal(half, (x_TD.float() + 0.5 * y_TD.float()).to(dtype))
    for row in range(21):
        alone = rms_norm(x_TD[row : row + 1], weight_D, 1e-6)
        assert torch.equal(alone[0], found[row])
    spread = noise(21, 2 * width)[:, ::2]
    assert torch.equal(rms_norm(spread, weight_D, 1e-6)[3:4], rms_norm(spread[3:4], weight_D, 1e-6))


@built
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 4), (8, 2), (60, 4), (128, 8), (3, 3)])
def test_the_router_chooses_as_in_torch(
    noise: Noise, num_experts: int, top_k: int, normalise: bool
) -> None:
    router = Router(score="softmax", top_k=top_k, normalise=normalise, scale=1.5)
    logits_TX = noise(200, num_experts, scale=2.0)
    logits_TX[::3] = (logits_TX[::3] * 2).round() / 2  # ties
    logits_TX[7], logits_TX[8, 0] = 1.0, 300.0
    found, expected = route(logits_TX, router), route_in_torch(logits_TX, router)
    assert torch.equal(found.topk_TK, expected.topk_TK)
    torch.testing.assert_close(found.weight_TK, expected.weight_TK, rtol=2e-6, atol=1e-35)
    alone = route(logits_TX[50:51], router)
    assert torch.equal(alone.weight_TK[0], found.weight_TK[50])


@built
def test_other_routers_stay_in_torch(noise: Noise) -> None:
    logits_TX = noise(9, 8)
    plain = Router(score="softmax", top_k=2, normalise=True)
    for router, bias_X in (
        (replace(plain, score="sigmoid"), None),
        (replace(plain, num_groups=4, top_groups=2), None),
        (plain, torch.randn(8)),
    ):
        found = route(logits_TX, router, bias_X)
        expected = route_in_torch(logits_TX, router, bias_X)
        assert torch.equal(found.topk_TK, expected.topk_TK)
        assert torch.equal(found.weight_TK, expected.weight_TK)


def without_experts(noise: Noise, *, top_k: int) -> MixtureLayer:
    """What adds up outputs; nobody gives it any."""
    router = Router(score="softmax", top_k=top_k, normalise=True)
    return MixtureLayer(
        sizes=Mixture(num_experts=8, expert_size=32, router=router),
        router=Linear(noise(8, 64)),
        router_bias_X=None,
        experts=(),
        shared=None,
        shared_gate=None,
    )


@built
@pytest.mark.parametrize("top_k", [1, 4])
def test_outputs_are_added_up_to_the_bits_of_torch(noise: Noise, top_k: int) -> None:
    layer = without_experts(noise, top_k=top_k)
    place_TK = torch.randperm(11 * top_k).view(11, top_k)
    returned = Returned(outputs_ND=noise(11 * top_k, 64), place_TK=place_TK)
    x_TD, weight_TK = noise(11, 64), torch.rand(11, top_k)
    for num_rows in (11, 1, 0):
        x, weights = x_TD[:num_rows], weight_TK[:num_rows]
        some = replace(returned, place_TK=place_TK[:num_rows])
        expected = weighted_sum(some.in_slots(), weights).to(x.dtype)
        assert torch.equal(layer.total(x, some, weights), expected)
        for factor in (1.0, 0.22):
            found = layer.add_to(x, x, some, weights, factor)
            assert torch.equal(found, add(x, expected, factor))


@built
def test_sums_that_do_not_fit_are_refused(noise: Noise) -> None:
    layer = without_experts(noise, top_k=2)
    returned = Returned(outputs_ND=noise(6, 64), place_TK=torch.arange(6).view(3, 2))
    for x_TD, weight_TK in ((noise(2, 64), torch.rand(3, 2)), (noise(3, 64), torch.rand(3, 1))):
        with pytest.raises(ValueError, match=r"outputs of 64 for \(3, 2\) slots"):
            layer.add_to(x_TD, x_TD, returned, weight_TK, 1.0)


@built
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype
) -> None:
    folder, config = tiny
    ids = Placement.contiguous(config.num_experts, 1).experts_of(0)
    weights = load_weights(folder, config, expert_ids=ids, dtype=dtype)
    apart = tuple(replace(layer) for layer in weights.layers)
    for layer in apart:
        object.__setattr__(layer, "block", None)
    tokens = [(i * 31 + 5) % 320 for i in range(90)]
    found = forward_alone(config, weights, tokens)
    expected = forward_alone(config, replace(weights, layers=apart), tokens)
    assert torch.equal(found.logits_SV, expected.logits_SV)
    assert torch.equal(found.experts_TLK, expected.experts_TLK)


@built
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "olmoe"])
def test_layers_are_in_one_call_where_all_parts_are_our_kernels(
    tiny_folders: dict[str, Path], dtype: torch.dtype, model: str
) -> None:
    folder = tiny_folders[model]
    config = read_config(folder)
    for tp_size in (1, 2):
        weights = load_weights(folder, config, expert_ids=(0,), dtype=dtype, tp_size=tp_size)
        blocks = [layer.block is not None for layer in weights.layers]
        assert all(blocks) if tp_size == 1 and model != "olmoe" else not any(blocks)


@built
def test_headwise_products_are_as_accurate_as_those_of_torch(noise: Noise) -> None:
    weight_HNK, x_THK = noise(4, 48, 24), noise(20, 4, 24)
    exact = torch.einsum("thk,hnk->thn", x_THK.double(), weight_HNK.double())
    in_torch = torch.einsum("thk,hnk->thn", x_THK, weight_HNK)
    found = HeadwiseLinear(weight_HNK)(x_THK)
    assert mean_error(found, exact) <= 1.001 * mean_error(in_torch, exact)


def logit_error(tiny: tuple[Path, ModelConfig], tokens: list[int], dtype: torch.dtype) -> float:
    """Mean error of a logit, beside float64."""
    folder, config = tiny
    found = whole(Ranks(folder, config, dtype=dtype), tokens).logits_SV
    naive = naive_forward(folder, tokens)
    return mean_error(found, naive.logits_TV)


@built
@pytest.mark.slow
def test_a_model_is_as_accurate_as_in_torch(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(i * i * 3 + 7 * i) % 320 for i in range(150)]
    found = logit_error(tiny, tokens, dtype)
    monkeypatch.setattr(kernels, "native", None)
    assert found <= 1.1 * logit_error(tiny, tokens, dtype)


@built
def test_the_self_test_reports_a_product_that_depends_on_the_batch(
    tiny_folders: dict[str, Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folders["qwen3_moe"]
    config = read_config(folder)
    placement = Placement.contiguous(config.num_experts, 1)
    weights = load_weights(folder, config, expert_ids=placement.experts_of(0), dtype=dtype)
    with torch.inference_mode():
        assert exactness(Model(config), weights, placement=placement).exact
    product = End.__call__

    def careless(end: End) -> tuple[torch.Tensor, torch.Tensor]:
        logits_SV, ids_TLK = product(end)
        return logits_SV * (1 + 0.01 * len(logits_SV)), ids_TLK

    monkeypatch.setattr(End, "__call__", careless)
    with torch.inference_mode():
        report = exactness(Model(config), weights, placement=placement)
    assert report.differing == ("chunks of 7", "decoded beside another")


@pytest.mark.slow
def test_without_the_extension_torch_does_the_same(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)
    assert kernels.instructions() == ""
    folder, config = tiny
    ranks = Ranks(folder, config, dtype=dtype)
    assert ranks.contexts[0].kv.pages is None
    tokens = [(i * 13) % 320 for i in range(70)]
    expected = whole(ranks, tokens)
    found = WAYS["chunks of 7"](ranks, tokens)
    assert torch.equal(found.logits_SV, expected.logits_SV)
