"""Mode replicas: independent engines behind one balancer, with the tokens of all other modes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from interlace.comm.testing import LocalCommunicator, LocalWorld
from interlace.rollout import ConfigError, Rollout, RolloutConfig, load_config
from interlace.rollout.digest import digest
from interlace.rollout.engine import Engine
from interlace.rollout.figures import engines, figures
from interlace.rollout.timeline import draw_timeline
from interlace.rollout.trace import read_trace, write_trace
from interlace.rollout.trajectory import Trajectory
from interlace.rollout.turns import RolloutError

PATIENCE_S = 30.0


def tiny(*overrides: str) -> RolloutConfig:
    return load_config(preset="tiny", overrides=overrides)


def in_replicas(world: int, tp: int, *overrides: str) -> RolloutConfig:
    return tiny("mode=replicas", f"layout.world={world}", f"layout.tp={tp}", *overrides)


def played(config: RolloutConfig) -> tuple[list[Trajectory], Rollout]:
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    return trajectories, rollout


@pytest.fixture(scope="module")
def reference() -> str:
    return digest(played(tiny("mode=serial", "layout.world=1"))[0])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp", "replicas"), [(4, 1, 2), (4, 2, 2)])
def test_the_digest_of_every_other_mode(
    world: int, tp: int, replicas: int, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    real = LocalWorld.communicator

    def noting(
        self: LocalWorld, key: object, members: Sequence[int], rank: int
    ) -> LocalCommunicator:
        made.append(tuple(members))
        return real(self, key, members, rank)

    monkeypatch.setattr(LocalWorld, "communicator", noting)
    config = in_replicas(world, tp, f"layout.replicas={replicas}", "launch.serial_device_slots=1")
    trajectories, rollout = played(config)
    assert digest(trajectories) == reference
    assert sorted(rollout.records) == list(range(world))
    assert engines(rollout.records) == list(config.layout.engines)
    for members in made:
        assert any(set(members) <= set(engine) for engine in config.layout.engines), members
    assert figures(rollout.records).coexisting_steps_share == 0


@pytest.mark.slow
def test_one_runs_on_while_another_stands_still(
    reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    step = Engine.step

    async def standing_still(self: Engine) -> bool:
        if self.rank == 0 and self.journal.tickets and not released.is_set():
            assert released.wait(PATIENCE_S)
        return await step(self)

    monkeypatch.setattr(Engine, "step", standing_still)
    config = in_replicas(2, 1)
    with Rollout(config) as rollout:
        run = iter(rollout.run(config.expand_tasks()))
        first = [next(run) for _ in range(4)]
        assert not released.is_set()
        released.set()
        trajectories = [*first, *run]
    assert digest(trajectories) == reference
    where = {number: rank for rank in (0, 1) for number in sampled(rollout, rank)}
    assert {where[trajectory.trajectory_id] for trajectory in first} == {1}
    assert set(where.values()) == {0, 1}


def sampled(rollout: Rollout, rank: int) -> set[int]:
    steps, _ = rollout.records[rank]
    return {number for step in steps for number in step.sampled}


@pytest.mark.slow
def test_the_failure_of_one_ends_the_job_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    async def failing(self: Engine) -> bool:
        if self.rank == 3 and self.journal.tickets:
            raise ValueError("a shape that does not fit")
        return await step(self)

    monkeypatch.setattr(Engine, "step", failing)
    config = in_replicas(4, 1, "layout.replicas=2")
    with pytest.raises(RolloutError, match="replica 1 of 2: ValueError: a shape"):
        played(config)


@pytest.mark.slow
def test_records_of_engines_that_step_apart_are_combined(recorded_run, tmp_path):
    busy, lazy = recorded_run(["(PPPP)", "DD", "DD"]), recorded_run(["", "(PP)", "DDDD", "", "DD"])
    apart = {2 + rank: (steps, moved(tickets, 2)) for rank, (steps, tickets) in lazy.items()}
    got, one, two = figures({**busy, **apart}), figures(busy), figures(apart)
    assert engines({**busy, **apart}) == [(0, 1), (2, 3)]
    assert got.tickets_per_step == (3 * one.tickets_per_step + 3 * two.tickets_per_step) / 6
    assert got.decode_gap_max == max(one.decode_gap_max, two.decode_gap_max)
    assert got.idle_share == {**one.idle_share, **two.idle_share}
    write_trace(tmp_path / "trace.json", {**busy, **apart})
    assert figures(read_trace(tmp_path / "trace.json")).tickets_per_step == got.tickets_per_step
    draw_timeline(tmp_path / "timeline.png", {**busy, **apart}, mode="replicas")


def moved(tickets, by: int):
    return [replace(t, members=tuple(member + by for member in t.members)) for t in tickets]


def test_by_default_there_is_one_for_every_tp_ranks():
    layout = in_replicas(4, 2).layout
    assert (layout.replicas, layout.dp, layout.ep) == (2, 2, 2)
    assert layout.engines == ((0, 1), (2, 3))
    assert [layout.leader(group) for group in range(layout.dp)] == [0, 2]
    assert RolloutConfig.model_validate_json(in_replicas(4, 2).model_dump_json()).layout == layout


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("layout.replicas=2",),
            "layout.replicas is of mode replicas, and the mode is multiplexed",
        ),
        (("mode=replicas", "layout.world=4", "layout.replicas=3"), "replicas=3 of 4 ranks"),
        (("mode=replicas", "layout.replicas=4"), "replicas=4 of 2 ranks"),
        (("mode=replicas", "layout.world=4", "layout.tp=2", "layout.replicas=4"), "groups of tp=2"),
        (("mode=replicas", 'unsafe.arms=["swap"]'), "one rank cannot disagree"),
        (("mode=replicas", "layout.prefill_ranks=1"), "prefill_ranks is of mode disaggregated"),
    ],
)
def test_ranks_that_cannot_be_cut_so_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        tiny(*overrides)
