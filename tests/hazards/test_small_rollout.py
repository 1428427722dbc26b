"""The small rollout that the hazards' own way runs in: right in every layout, and it notices."""

from typing import Any

import pytest
import torch

from interlace.comm.plan import Mode
from interlace.rollout.messages import Abort
from interlace.rollout.verify.hazards.hazard import WrongDataError
from interlace.rollout.verify.hazards.small_model import SmallModel
from interlace.rollout.verify.hazards.small_rollout import (
    Script,
    Size,
    run_small,
    same_collectives,
    turn,
)

SCRIPT: Script = {
    0: [(0, turn(1, 9, 5)), (1, turn(4, 9, 3, prompt=1)), (3, Abort(trajectory=1))],
    2: [(2, turn(3, 6, 3))],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "whole_forward", "multiplexed", "chunked"])
@pytest.mark.parametrize(("world", "tp"), [(3, 1), (4, 2)])
def test_every_token_is_right(mode: Mode, world: int, tp: int) -> None:
    for seed in range(3):
        ranks = run_small(Size(world=world, tp=tp, mode=mode), SCRIPT, seed=seed)
        assert {n for rank in ranks for n in rank.results} == {1, 3, 4}
        same_collectives(ranks[:tp])


class LosesARow(SmallModel):
    async def _exchange(self, stage: str, rows: torch.Tensor, *counts: Any) -> torch.Tensor:
        arrived = await super()._exchange(stage, rows, *counts)
        return torch.cat([torch.zeros_like(arrived[:1]), arrived[1:]])


def test_one_wrong_row_is_noticed() -> None:
    with pytest.raises(WrongDataError, match=r"trajectory \d: tokens \[.*\] are not \["):
        run_small(Size(), {0: [(0, turn(1, 9, 5))]}, models={1: LosesARow})
