"""What leads to each collective, from the sizes of a model."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.moe.driving import Ranks, describe

from interlace.comm.path import Op
from interlace.moe.config import read_config
from interlace.moe.program_work import with_work


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "llama"])
def test_every_collective_of_a_program_has_work_and_nothing_else_changes(
    tiny_folders: dict[str, Path], name: str, tp_size: int
) -> None:
    folder = tiny_folders[name]
    config = read_config(folder)
    ranks, seen = Ranks(folder, config, world=2, tp_size=tp_size), list[tuple[str, str, str]]()
    ranks.run(describe(([1, 2, 3], 0, (0,))), program=seen)
    program = tuple(Op(kind=kind, role=role, stage=stage) for kind, role, stage in seen)
    worked = with_work(program, config, tp_size)
    assert tuple(replace(op, work=1) for op in worked) == program
    assert all(op.work >= 1 for op in worked)
    if tp_size == 2:
        attended = max(op.work for op in worked if op.stage.endswith("heads"))
        assert attended > max(op.work for op in worked if op.stage == "0.rows")


def test_experts_outweigh_all_else_where_they_do_most_of_the_work(
    tiny_folders: dict[str, Path],
) -> None:
    config = read_config(tiny_folders["qwen3_moe"])
    assert config.mixture is not None
    mixture = replace(config.mixture, expert_size=100_000)
    wide = replace(config, mixture=mixture, num_layers=1, moe_layers=(0,))
    stages = ("0.rows", "0.heads", "0.counts", "0.dispatch", "0.combine", "final.rows")
    program = tuple(Op(kind="Gather", role="ep", stage=stage) for stage in stages)
    work = {op.stage: op.work for op in with_work(program, wide, 2)}
    assert work["0.combine"] > 2 * sum(work.values()) / 3
    assert work["0.dispatch"] == work["0.rows"] < work["0.counts"] < work["0.heads"]
