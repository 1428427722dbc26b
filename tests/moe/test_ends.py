"""Both ends of a pass in one call each: the bits of torch's operations one by one."""

from typing import Any

import pytest
import torch

from interlace.moe import kernels
from interlace.moe.ends import End, rotation_of, rows_of
from interlace.moe.linear import Linear
from interlace.moe.norm import rms_norm

pytestmark = pytest.mark.skipif(kernels.native is None, reason="there is no extension")
IDS = ([], [3], [0, 6, 6, 2], list(range(7)))


@pytest.mark.parametrize("ids", IDS)
def test_rows_are_those_that_torch_selects(dtype: torch.dtype, ids: list[int]) -> None:
    table, numbers = torch.randn(7, 48).to(dtype), torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(rows_of(table, numbers), table.index_select(0, numbers))
    assert torch.equal(rows_of(table.T, numbers), table.T.index_select(0, numbers))
    assert torch.equal(rows_of(table, numbers.repeat(2)[::2]), table[numbers.repeat(2)[::2]])


@pytest.mark.parametrize("wrong", [7, -1])
def test_a_row_that_is_not_there_is_an_error(wrong: int) -> None:
    for ids in ([wrong], [0, wrong]):
        with pytest.raises(IndexError):
            rows_of(torch.randn(7, 48), torch.tensor(ids))
        with pytest.raises(IndexError):
            rotation_of(torch.randn(7, 48), torch.randn(7, 48), torch.tensor(ids))


@pytest.mark.parametrize("ids", IDS)
def test_a_rotation_is_two_rows_for_each_position(ids: list[int]) -> None:
    cos, sin, positions = torch.randn(7, 12), torch.randn(7, 12), torch.tensor(ids).long()
    found = rotation_of(cos, sin, positions)
    for rows, table in zip(found, (cos, sin), strict=True):
        assert rows.is_contiguous()
        assert torch.equal(rows, table[positions][:, None])
    for rows, table in zip(rotation_of(cos.T, sin.T, positions), (cos.T, sin.T), strict=True):
        assert torch.equal(rows, table[positions][:, None])


def end(
    x_SD: torch.Tensor, norm_D: torch.Tensor, head: Linear, *more: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return End(x_SD, norm_D, head, *more, eps=1e-6, **how)()


@pytest.mark.parametrize("multiplier", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 33])
def test_logits_have_the_bits_of_norm_and_product_one_by_one(
    instructions: str, dtype: torch.dtype, num_rows: int, multiplier: float
) -> None:
    x_SD, norm_D = torch.randn(num_rows, 64).to(dtype), torch.randn(64).to(dtype)
    head = Linear(torch.randn(100, 64).to(dtype))
    assert head.own is not None
    expected = head(rms_norm(x_SD, norm_D, 1e-6))
    if multiplier != 1:
        expected = expected * multiplier
    for rows in (x_SD, torch.stack((x_SD, x_SD), dim=1)[:, 1]):
        found, nobody = end(rows, norm_D, head, multiplier=multiplier)
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float())
        assert not nobody.numel()


def test_rows_and_experts_are_read_when_it_is_called(dtype: torch.dtype) -> None:
    x_SD, norm_D = torch.zeros(3, 64).to(dtype), torch.randn(64).to(dtype)
    head, topk_LTK = Linear(torch.randn(100, 64).to(dtype)), torch.zeros(2, 3, 4).long()
    later = End(x_SD, norm_D, head, topk_LTK, eps=1e-6)
    x_SD.copy_(torch.randn(3, 64))
    topk_LTK.copy_(torch.randint(0, 9, (2, 3, 4)))
    logits_SV, ids_TLK = later()
    assert torch.equal(logits_SV, head(rms_norm(x_SD, norm_D, 1e-6)).float())
    assert torch.equal(ids_TLK, topk_LTK.transpose(0, 1))


def test_logits_of_rows_that_are_not_the_heads_are_refused(dtype: torch.dtype) -> None:
    head = Linear(torch.randn(100, 64).to(dtype))
    with pytest.raises(ValueError, match="rows of 48, but the head has 64 inputs"):
        end(torch.randn(2, 48).to(dtype), torch.randn(48).to(dtype), head)


@pytest.mark.parametrize("id_dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("shape", [(3, 5, 2), (1, 1, 1), (8, 0, 4), (2, 70, 8)])
def test_experts_are_put_row_by_row(id_dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    head, topk_LTK = Linear(torch.randn(10, 64)), torch.randint(0, 256, shape)
    for multiplier in (1.0, 2.0):  # in the call, and by torch
        _, found = end(
            torch.randn(1, 64),
            torch.randn(64),
            head,
            topk_LTK,
            multiplier=multiplier,
            id_dtype=id_dtype,
        )
        assert found.dtype == id_dtype
        assert torch.equal(found, topk_LTK.transpose(0, 1).to(id_dtype))


def test_without_kernels_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = torch.randn(7, 48), torch.tensor([6, 0])
    x_SD, norm_D, weight_VD = torch.randn(2, 48), torch.randn(48), torch.randn(10, 48)
    rows = rows_of(table, ids)
    monkeypatch.setattr(kernels, "native", None)
    assert torch.equal(rows_of(table, ids), rows)
    logits_SV, _ = end(x_SD, norm_D, Linear(weight_VD))
    torch.testing.assert_close(logits_SV, rms_norm(x_SD, norm_D, 1e-6) @ weight_VD.T)
