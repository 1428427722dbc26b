"""Weights change on ranks that are processes: the driver reaches all of them, leaders or not."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.transport import Ranks

from interlace.rollout import Rollout, Task, UpdateError, load_config
from interlace.rollout.cache import model_folder

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PROMPTS = ["one", "another, somewhat longer one", "a third"] * 4


def changed(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    tensors = load_file(model_folder("tiny-qwen3-moe") / "model.safetensors")
    return {n: t + 0.05 * torch.randn(t.shape, generator=noise) for n, t in sorted(tensors.items())}


def rollout_over(ranks: Ranks, *overrides: str) -> Rollout:
    return Rollout(
        load_config(
            preset="tiny",
            overrides=[
                "launch.kind=torchrun",
                f"launch.backend={ranks.backend}",
                f"launch.transport={ranks.transport}",
                f"layout.world={ranks.size}",
                "weights.bucket_mib=1",
                *overrides,
            ],
        )
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_gets_new_weights_while_turns_run(ranks: Ranks, tp: int) -> None:
    with rollout_over(ranks, f"layout.tp={tp}") as rollout:
        if not rollout.is_driver:
            assert rollout.update_weights(changed(1)).num_bytes == 0
            return
        running = [rollout.submit(Task(prompt=text, max_tokens=40)) for text in PROMPTS]
        reports = [rollout.update_weights(changed(seed), mode="retract") for seed in (1, 2)]
        assert [report.version for report in reports] == [1, 2]
        assert len(reports[0].rank_bytes) == ranks.size
        for future in running:
            sampled = future.result(30)
            versions = sampled.version[sampled.loss_mask]
            assert (versions[1:] >= versions[:-1]).all()
            assert set(versions.tolist()) <= {0, 1, 2}
        with pytest.raises(UpdateError, match="is missing"):
            rollout.update_weights({})
        assert rollout.weights_digest == reports[1].digest


def test_turns_are_asked_for_while_weights_are_on_their_way(ranks: Ranks) -> None:
    """Two threads write to one connection."""
    found: list[str] = []
    with rollout_over(ranks, "sampling.temperature=0") as rollout:
        if not rollout.is_driver:
            return
        rollout.update_weights(changed(3))
        updating = threading.Thread(
            target=lambda: [rollout.update_weights(changed(3)) for _ in range(10)]
        )
        updating.start()
        for _ in range(5):
            answers = rollout.generate(PROMPTS[:3], max_tokens=6)
            found.append(str([answer.token_ids.tolist() for answer in answers]))
        updating.join(60)
        assert not updating.is_alive()
        assert rollout.version == 11
        assert len(set(found)) == 1
