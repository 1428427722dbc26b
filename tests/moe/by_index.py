"""Rows that are read, and outputs that are written, where an index says."""

from collections.abc import Callable

import torch

from interlace.moe.dispatch import Dispatched
from interlace.moe.experts import Expert, apply_experts
from interlace.moe.placement import Placement


def sorted_rows(dispatched: Dispatched) -> torch.Tensor:
    """[R, D] the rows that arrived, sorted by expert."""
    if dispatched.reads_R is None:
        return dispatched.rows_ND
    return dispatched.rows_ND.index_select(0, dispatched.reads_R)


def experts_of_rows(dispatched: Dispatched, placement: Placement, rank: int) -> torch.Tensor:
    """[R] the expert of each sorted row."""
    own = torch.tensor(placement.experts_of(rank), dtype=torch.long)
    return own.repeat_interleave(torch.tensor(dispatched.expert_counts, dtype=torch.long))


def in_order(dispatched: Dispatched, y_RD: torch.Tensor) -> torch.Tensor:
    """[R, D] sorted outputs in the order in which they are sent back."""
    if dispatched.writes_R is None:
        return y_RD
    return torch.empty_like(y_RD).index_copy_(0, dispatched.writes_R, y_RD)


def assert_experts_go_by_index(noise: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Experts give the outputs of sorted rows, wherever rows are read and outputs are written."""
    experts = [
        Expert(
            gate_ID=noise(96, 64).to(dtype),
            up_ID=noise(96, 64).to(dtype),
            down_DI=noise(64, 96).to(dtype),
        )
        for _ in range(3)
    ]
    x_ND = noise(60, 80).to(dtype)[:, 5:69]
    for counts in ((40, 0, 37), (0, 1, 0), (0, 0, 0), (1200, 3, 5)):
        num_rows = sum(counts)
        reads_R, writes_R = torch.randint(60, (num_rows,)), torch.randperm(num_rows)
        sorted_RD = apply_experts(experts, x_ND[reads_R], counts)
        assert torch.equal(apply_experts(experts, x_ND, counts, reads_R=reads_R), sorted_RD)
        out_ND = torch.zeros_like(sorted_RD)
        found = apply_experts(
            experts, x_ND, counts, reads_R=reads_R, writes_R=writes_R, out_ND=out_ND
        )
        assert found is out_ND
        assert torch.equal(found[writes_R], sorted_RD)
        found = apply_experts(experts, x_ND[reads_R], counts, writes_R=writes_R)
        assert torch.equal(found[writes_R], sorted_RD)
