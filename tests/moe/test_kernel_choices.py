"""Every choice of instructions that runs here: a row's bits are its own, and memory is left alone.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread

import pytest
import torch
from tests.moe.by_index import assert_experts_go_by_index
from tests.moe.test_paged_attention import Pool

from interlace.moe import kernels
from interlace.moe.arena import Arena
from interlace.moe.experts import Expert, apply_experts
from interlace.moe.linear import padded_linear

pytestmark = pytest.mark.usefixtures("instructions")
TILES = "AMX BF16"
SHAPES = [(512, 768), (512, 16), (66, 33), (32, 80), (1026, 100), (30, 64)]
"""Inputs and outputs, some of which fill no tile."""
COUNTS = (*range(1, 52), 63, 64, 65, 100, 128, 199)
BFLOAT16 = torch.bfloat16
PAST_TORCH = """
import torch
from interlace.moe import kernels

torch.set_num_threads(1)
weight, x = torch.randn(96, 160).bfloat16(), torch.randn(37, 160).bfloat16()
own = kernels.PackedWeight(weight)
theirs, ours = x @ weight.T, own(x)
exact = x.double() @ weight.double().T
for rows in (37, 1, 16, 7):
    assert torch.equal(own(x[:rows]), ours[:rows])
    found = x[:rows] @ weight.T
    torch.testing.assert_close(found.double(), exact[:rows], rtol=2**-7, atol=1e-2)
    assert torch.equal(x @ weight.T, theirs)
"""


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(BFLOAT16)


def rounding_product(num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and 200 rows whose sums are all rounding: in another order, another number."""
    half_NK, half_TK = noise(num_outputs, num_inputs // 2), noise(200, num_inputs // 2)
    weight_NK = torch.cat((half_NK, -half_NK.flip(1)), dim=1)
    return weight_NK, torch.cat((half_TK, half_TK.flip(1)), dim=1)


def test_the_best_choice_is_the_first_and_only_those_that_run_can_be_used(
    instructions: str,
) -> None:
    assert kernels.instructions() == instructions
    with pytest.raises(ValueError, match="no kernels with Z80 run here"):
        kernels.native.use("Z80")
    assert kernels.instructions() == instructions


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_for_every_number_of_rows(shape: tuple[int, int]) -> None:
    weight_NK, x_TK = rounding_product(*shape)
    linear = kernels.PackedWeight(weight_NK)
    expected = linear(x_TK)
    assert expected.any()
    for count in COUNTS:
        start = count % 2
        assert torch.equal(linear(x_TK[start : start + count]), expected[start : start + count])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_rows_nor_outputs_know_their_neighbours(shape: tuple[int, int]) -> None:
    weight_NK, x_TK = rounding_product(*shape)
    expected = kernels.PackedWeight(weight_NK)(x_TK)
    for start, num_rows in ((0, 1), (3, 16), (50, 37)):
        rows = slice(start, start + num_rows)
        among = torch.full_like(x_TK, torch.nan)
        among[::3], among[rows] = torch.inf, x_TK[rows]
        assert torch.equal(kernels.PackedWeight(weight_NK)(among)[rows], expected[rows])
    others = torch.arange(shape[1]) % 5 != 2
    weight_NK[others] = torch.nan
    found = kernels.PackedWeight(weight_NK)(x_TK)
    assert torch.equal(found[:, ~others], expected[:, ~others])
    assert found[:, others].isnan().all()


@pytest.mark.parametrize("num_rows", [1, 9, 21])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_beside_a_product_is_read_or_written(shape: tuple[int, int], num_rows: int) -> None:
    (num_inputs, num_outputs), arena = shape, Arena()
    weight_NK, rows = rounding_product(*shape)
    expected = kernels.PackedWeight(weight_NK)(rows[:num_rows])
    nothing = torch.full_like(weight_NK, torch.nan)
    parts = [kernels.PackedWeight(part, arena) for part in (nothing, weight_NK, nothing)]
    x_TK = torch.full((num_rows + 2, num_inputs + 6), torch.nan, dtype=BFLOAT16)
    x_TK[1:-1, 2:-4] = rows[:num_rows]
    out_TN = torch.full((num_rows + 2, num_outputs + 6), 7.0, dtype=BFLOAT16)
    parts[1].multiply(x_TK[1:-1, 2:-4], out_TN[1:-1, 2:-4])
    assert torch.equal(out_TN[1:-1, 2:-4], expected)
    out_TN[1:-1, 2:-4] = 7.0
    assert (out_TN == 7.0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_as_accurate_as_that_of_torch(shape: tuple[int, int]) -> None:
    weight_NK, x_TK = noise(shape[1], shape[0]), noise(40, shape[0])
    exact = x_TK.double() @ weight_NK.double().T
    found, theirs = kernels.PackedWeight(weight_NK)(x_TK), padded_linear(x_TK, weight_NK)
    off = (found.double() - exact).abs()
    assert off.mean() <= 1.001 * (theirs.double() - exact).abs().mean()
    assert (off <= 2**-7 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("sizes", [(128, 32), (96, 512), (70, 64)], ids=str)
def test_a_row_of_an_expert_is_the_same_whoever_else_is_there(sizes: tuple[int, int]) -> None:
    hidden, width = sizes
    experts = [
        Expert(
            gate_ID=noise(width, hidden), up_ID=noise(width, hidden), down_DI=noise(hidden, width)
        )
        for _ in range(3)
    ]
    x_RD = noise(90, hidden)
    expected = apply_experts(experts, x_RD, (53, 0, 37))
    for start, end in ((0, 1), (3, 50), (52, 54), (40, 90), (53, 70)):
        first = max(0, min(end, 53) - start)
        counts = (first, 0, end - start - first)
        assert torch.equal(apply_experts(experts, x_RD[start:end], counts), expected[start:end])


def test_an_expert_is_as_accurate_as_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, down, x_RD = noise(96, 70, scale=0.3), noise(96, 70), noise(70, 96), noise(45, 70)
    gates = x_RD.double() @ gate.double().T
    exact = (gates * gates.sigmoid() * (x_RD.double() @ up.double().T)) @ down.double().T
    found = Expert(gate_ID=gate, up_ID=up, down_DI=down)(x_RD)
    monkeypatch.setattr(kernels, "native", None)
    theirs = Expert(gate_ID=gate, up_ID=up, down_DI=down)(x_RD)
    assert (found - exact).abs().mean() <= (theirs - exact).abs().mean()


@pytest.mark.parametrize("shape", [(2, 4, 64), (1, 3, 80), (1, 20, 16)], ids=str)
def test_a_row_that_attends_is_the_same_in_every_chunk(shape: tuple[int, int, int]) -> None:
    length = 150
    pool = Pool([length, 90], shape, BFLOAT16)
    (expected,) = pool.attend((0, 0, length))
    exact = pool.exact(0, 0, length)
    off = (expected.double() - exact).abs().mean()
    assert off <= 1.45 * (exact.to(BFLOAT16).double() - exact).abs().mean()
    for size in (1, 5, 16, 17, 50):
        for start in (0, 31, 63, 64, length - size):
            beside, _ = pool.attend((0, start, start + size), (1, 80, 81))
            assert torch.equal(beside, expected[start : start + size]), (start, size)


def test_every_thread_gets_the_same_bits() -> None:
    weight_NK, x_TK = rounding_product(512, 256)
    linear = kernels.PackedWeight(weight_NK)
    expected = linear(x_TK)
    wrong: list[int] = []

    def multiply(start: int) -> None:
        for count in (*range(1, 40), 150):
            rows = slice(start, start + count)
            if not torch.equal(linear(x_TK[rows]), expected[rows]):
                wrong.append(count)

    threads = [Thread(target=multiply, args=(start,)) for start in (0, 41)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_sum_on_tiles_has_its_documented_order(instructions: str) -> None:
    if instructions != TILES:
        pytest.skip("other instructions, another order")
    for num_inputs in (512, 70, 30):
        weight_NK, x_TK = rounding_product(num_inputs, 48)
        sums_TN = torch.zeros(len(x_TK), 48)
        for first in range(0, num_inputs, 32):
            apart = torch.zeros(2, len(x_TK), 48)  # of even and of odd inputs
            for k in range(first, min(first + 32, num_inputs)):
                # Rounded once: a product of two bfloat16 is exact in float32.
                apart[k % 2] += x_TK[:, k : k + 1].float() * weight_NK[:, k].float()
            sums_TN += apart[0] + apart[1]
        assert torch.equal(kernels.PackedWeight(weight_NK)(x_TK), sums_TN.to(BFLOAT16))


@pytest.mark.slow
@pytest.mark.processes
def test_torch_multiplies_right_after_our_tiles_and_before(instructions: str) -> None:
    if instructions != TILES:
        pytest.skip("only tiles have a state that a thread keeps")
    free = os.environ | {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}  # both use tiles
    subprocess.run([sys.executable, "-c", PAST_TORCH], check=True, env=free, timeout=50)


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_experts_read_rows_and_write_outputs_wherever_they_lie(dtype: torch.dtype) -> None:
    assert_experts_go_by_index(noise, dtype)
