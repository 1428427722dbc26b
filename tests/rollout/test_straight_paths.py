"""Which paths of a job may go straight: over windows that nothing delays, and as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from interlace.comm.windows import native
from interlace.moe import kernels
from interlace.moe.random_model import write_random_model
from interlace.rollout import RolloutConfig, load_config
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import compose
from interlace.rollout.launch.processes import ProcessTransport

pytestmark = pytest.mark.skipif(native() is None, reason="built without a compiler")


def composed(config: RolloutConfig, folder: Path) -> tuple[list[str], set[str], str]:
    """Paths that the only rank of a job can let go straight, those that offer it, and the order of
    its steps."""
    write_random_model(folder, "qwen3_moe", 1, num_layers=1)
    with ProcessTransport(
        rank=0, world=1, store=dist.HashStore(), launch=config.launch
    ) as transport:
        rank = compose(config, folder, transport, Inbox(), lambda event: None, num_blocks=4)
        engine = rank.engine
        can = sorted(path for path, role in engine._sequencer._crossings if role == "ep")
        offers = {name for name, context in engine._contexts.items() if context.straight}
        return can, offers, engine._config.policy


SIDE_BY_SIDE = "abreast" if kernels.instructions() else "plan"


@pytest.mark.parametrize(
    ("overrides", "straight", "policy"),
    [
        ((), ["decode", "prefill"], SIDE_BY_SIDE),
        (("order.policy=plan",), ["decode", "prefill"], "plan"),
        (("order.policy=turnstile",), ["decode", "prefill"], "turnstile"),
        (("order.layers_per_boundary=1",), ["decode", "prefill"], "plan"),
        (("dispatch.prefill=gather",), ["decode", "prefill"], "plan"),
        (("mode=serial",), ["decode", "prefill"], "plan"),
        (("mode=whole_forward",), ["decode", "prefill"], "plan"),
        (("mode=chunked",), ["mixed"], "plan"),
        (("launch.transport=gloo",), [], "plan"),
        (("launch.link.latency_us=5",), [], "plan"),
        (("launch.check_each_op=true",), [], "plan"),
        (("launch.serial_device_slots=1",), [], "plan"),
    ],
    ids=str,
)
def test_paths_go_straight_over_windows_alone_and_there_side_by_side(
    overrides: tuple[str, ...], straight: list[str], policy: str, tmp_path: Path
) -> None:
    config = load_config(
        preset="tiny", overrides=("launch.kind=torchrun", "layout.world=1", *overrides)
    )
    crossings, offers, ordered = composed(config, tmp_path)
    assert crossings == straight
    assert offers == set(straight)
    assert ordered == policy


def test_no_path_of_an_unsafe_job_goes_straight(tmp_path: Path) -> None:
    config = load_config(preset="tiny", overrides=("launch.kind=torchrun", "layout.world=1"))
    unsafe = config.unsafe.model_copy(update={"arms": ("free_order",)})
    config = config.model_copy(update={"unsafe": unsafe})
    assert composed(config, tmp_path) == ([], set(), "plan")
