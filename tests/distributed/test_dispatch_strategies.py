"""Every strategy over process groups gives the numbers of the default one."""

import pytest
from tests.distributed.transport import Ranks

from interlace.rollout import Rollout, load_config
from interlace.rollout.digest import digest

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def played(ranks: Ranks, prefill: str, decode: str) -> str | None:
    """The digest of the tiny job; None where the episodes are not played."""
    config = load_config(
        preset="tiny",
        overrides=(
            "launch.kind=torchrun",
            f"launch.backend={ranks.backend}",
            f"launch.transport={ranks.transport}",
            f"layout.world={ranks.size}",
            "scheduler.chunk_tokens=24",
            f"dispatch.prefill={prefill}",
            f"dispatch.decode={decode}",
        ),
    )
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    return digest(trajectories) if rollout.is_driver else None


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> str | None:
    return played(ranks, "all_to_all", "all_to_all")


@pytest.mark.parametrize(("prefill", "decode"), [("gather", "fixed"), ("fixed", "gather")])
def test_one_digest_whatever_the_strategies(
    ranks: Ranks, prefill: str, decode: str, reference: str | None
) -> None:
    assert played(ranks, prefill, decode) == reference
