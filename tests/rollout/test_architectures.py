"""Models with dense layers, with none but dense layers and with latent attention, played whole."""

from __future__ import annotations

import pytest

from interlace.rollout import Rollout, Trajectory, load_config
from interlace.rollout.digest import digest

pytestmark = pytest.mark.slow


def played(model: str, *overrides: str) -> tuple[list[Trajectory], int]:
    """The trajectories, and how many collectives the forward passes of rank 0 issued."""
    ways = (f"model.path={model}", "tasks.0.count=2", "sampling.max_tokens=5", *overrides)
    config = load_config(preset="tiny", overrides=ways)
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    assert rollout.exact
    return trajectories, len(rollout.records[0][1])


@pytest.mark.parametrize("mode", ["serial", "chunked", "multiplexed"])
def test_a_model_without_experts_needs_no_collective_on_data_parallel_ranks(mode: str) -> None:
    one, none = played("tiny-llama", "layout.world=1", f"mode={mode}")
    two, none_either = played("tiny-llama", "layout.world=2", f"mode={mode}")
    assert (none, none_either) == (0, 0)
    assert digest(one) == digest(two)
    assert one[0].experts.shape[1:] == (0, 0)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-deepseek-v3", "tiny-olmoe"])
def test_one_digest_with_and_without_tensor_parallelism(model: str) -> None:
    one, _ = played(model, "layout.world=1", "mode=serial")
    two, some = played(model, "layout.world=2", "layout.tp=2")
    assert some > 0
    assert digest(one) == digest(two)


def test_only_layers_with_experts_are_in_the_ledger() -> None:
    trajectories, _ = played("tiny-deepseek-v2", "layout.world=1")
    trajectory = trajectories[0]
    assert trajectory.experts.shape == (trajectory.num_tokens, 3, 2)
    assert trajectory.experts[: trajectory.experts_known].max() > 1
