"""The rollout over the processes torchrun started gives the numbers of the one in a process."""

import pytest
from tests.distributed.transport import Ranks

from interlace.rollout import ConfigError, Rollout, load_config
from interlace.rollout.digest import digest
from interlace.rollout.launch.launcher import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def played(*overrides: str) -> str | None:
    """The digest of the tiny job; None where the episodes are not played."""
    config = load_config(preset="tiny", overrides=overrides)
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    if not rollout.is_driver:
        assert trajectories == []
        return None
    assert sorted(rollout.records) == list(range(config.layout.world))
    return digest(trajectories)


def over(ranks: Ranks, *overrides: str) -> str | None:
    return played(
        "launch.kind=torchrun",
        f"launch.backend={ranks.backend}",
        f"launch.transport={ranks.transport}",
        f"layout.world={ranks.size}",
        *overrides,
    )


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> str | None:
    """On CPU that of one rank in a LocalWorld; GPUs round differently, but always the same."""
    if ranks.backend == "nccl":
        return over(ranks, "mode=serial", "scheduler.chunk_tokens=64")
    return played("launch.kind=local", "layout.world=1", "mode=serial")


@pytest.mark.parametrize(
    "mode", ["serial", "chunked", "whole_forward", "multiplexed", "disaggregated", "replicas"]
)
def test_one_digest_over_processes(ranks: Ranks, mode: str, reference: str | None) -> None:
    found = over(ranks, f"mode={mode}", "scheduler.chunk_tokens=32")
    assert found == (reference if ranks.rank == 0 else None)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_same_digest_with_heads_split_over_processes(
    ranks: Ranks, tp: int, reference: str | None
) -> None:
    if ranks.size % tp:
        with pytest.raises(ConfigError, match=f"tp={tp} does not divide world={ranks.size}"):
            over(ranks, f"layout.tp={tp}")
    else:
        found = over(ranks, f"layout.tp={tp}")
        assert found == (reference if ranks.rank == 0 else None)


def test_a_link_between_the_ranks_costs_time_and_changes_no_token(
    ranks: Ranks, reference: str | None
) -> None:
    link = ("launch.link.latency_us=200", "launch.link.gbit=1")
    if ranks.transport == "gloo":
        with pytest.raises(ConfigError, match="link needs the window"):
            over(ranks, *link)
    else:
        assert over(ranks, *link) == (reference if ranks.rank == 0 else None)


def test_the_same_digest_on_devices_that_are_strict_about_order(
    ranks: Ranks, reference: str | None
) -> None:
    strict = ["launch.serial_device_slots=1", "layout.tp=2", "scheduler.chunk_tokens=24"]
    strict += ["dispatch.prefill=gather", "dispatch.decode=fixed"]
    if ranks.backend == "nccl":
        with pytest.raises(ConfigError, match="serial_device_slots emulates what"):
            over(ranks, *strict)
    else:
        assert over(ranks, *strict) == (reference if ranks.rank == 0 else None)


def test_an_error_on_rank_0_ends_every_rank_and_the_next_rollout_works(ranks: Ranks) -> None:
    config = load_config(
        preset="tiny",
        overrides=["launch.kind=torchrun", f"layout.world={ranks.size}", "sampling.max_tokens=64"],
    )

    def broken() -> None:
        with Rollout(config) as rollout:
            for _ in rollout.run(config.expand_tasks() * 20):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if ranks.rank == 0 else LaunchError):
        broken()
    assert (over(ranks) is None) == (ranks.rank != 0)
