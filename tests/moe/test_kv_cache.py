"""Whole blocks leave one cache and enter another."""

from __future__ import annotations

import pytest
import torch

from interlace.moe.kv_cache import KVCache

PLANES = [{"key": (2, 4), "value": (2, 4)}, {"latent": (1, 8), "rope": (1, 4)}]


@pytest.mark.parametrize("planes", PLANES, ids=["heads", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_arrive_as_they_left_and_touch_no_others(
    planes: dict[str, tuple[int, int]], dtype: torch.dtype
) -> None:
    here = KVCache(num_layers=3, num_blocks=5, planes=planes, dtype=dtype)
    there = KVCache(num_layers=3, num_blocks=7, planes=planes, dtype=dtype)
    for name in planes:
        for layer in range(3):
            here.plane(layer, name).normal_()
    rows = here.read_blocks([4, 0, 2])
    assert rows.shape == (3, here.block_bytes) == (3, there.block_bytes)
    there.write_blocks([1, 6, 3], rows)
    there.write_blocks([], here.read_blocks([]))
    for name in planes:
        for layer in range(3):
            sent, got = here.plane(layer, name), there.plane(layer, name)
            assert torch.equal(sent[[4, 0, 2]], got[[1, 6, 3]])
            assert not got[[0, 2, 4, 5]].any()
