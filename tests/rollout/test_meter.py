"""Callbacks: what they are told, in which order, and what becomes of one that raises."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from interlace.rollout import Rollout, RolloutConfig, Task, load_config
from interlace.rollout.callbacks import Callback, CallbackError
from interlace.rollout.config import ConfigError
from interlace.rollout.meter import Meter
from interlace.rollout.metrics_file import MetricsFile
from interlace.rollout.tensorboard import TensorBoard
from interlace.rollout.trajectory import Trajectory


class Recorder(Callback):
    def __init__(self, raise_on: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self._raise_on = raise_on

    def _record(self, method: str, argument: Any) -> None:
        self.calls.append((method, argument))
        self.threads.add(threading.current_thread().name)
        if method == self._raise_on:
            raise KeyError("no such table")

    def on_start(self, config: RolloutConfig) -> None:
        self._record("start", config)

    def on_trajectory(self, trajectory: Trajectory) -> None:
        self._record("trajectory", trajectory)

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._record("metrics", metrics)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._record("end", summary)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tiny_config() -> RolloutConfig:
    return load_config(preset="tiny", overrides=["sampling.max_tokens=2", "layout.world=1"])


def test_metrics_count_since_the_start_and_the_speed_since_the_last_time() -> None:
    clock, recorder = Clock(), Recorder()
    meter = Meter([recorder], clock=clock)
    meter.start(RolloutConfig())
    with meter.playing("sqlite"), meter.playing("frozen_lake"):
        meter.sampled(30)
        clock.now += 10
        meter._tell_metrics()
        meter.sampled(5)
        clock.now += 1
        meter._tell_metrics()
    meter.end(completed=True, exact=True)
    first, second = [metrics for method, metrics in recorder.calls if method == "metrics"][:2]
    assert (first["elapsed_s"], first["tokens_per_s"]) == (10.0, 3.0)
    assert (second["elapsed_s"], second["sampled_tokens"], second["tokens_per_s"]) == (11.0, 35, 5)
    assert first["running"] == {"frozen_lake": 1, "sqlite": 1}
    assert recorder.methods == ["start", "metrics", "metrics", "metrics", "end"]
    assert recorder.calls[-2][1]["running"] == {}
    assert recorder.calls[-1][1]["completed"] is True


def test_two_tickers_tell_once_a_period() -> None:
    clock, recorder = Clock(), Recorder()
    meter = Meter([recorder], period_s=1e-3, clock=clock)
    meter.start(RolloutConfig())

    async def tick_twice() -> None:
        tickers = [asyncio.create_task(meter.tick()) for _ in range(2)]
        for _ in range(3):
            clock.now += 1e-3 + 1e-6
            await asyncio.sleep(5e-3)
        for ticker in tickers:
            ticker.cancel()

    asyncio.run(tick_twice())
    assert 1 <= recorder.methods.count("metrics") <= 3


def test_a_failure_is_not_covered_by_that_of_a_callback() -> None:
    meter = Meter([Recorder(raise_on="end")])
    meter.start(RolloutConfig())
    meter.end(completed=False)
    again = Meter([Recorder(raise_on="end")])
    again.start(RolloutConfig())
    with pytest.raises(CallbackError, match=r"Recorder\.on_end raised KeyError: 'no such table'"):
        again.end(completed=True)


def test_all_callbacks_hear_of_what_one_fails_at() -> None:
    second = Recorder()
    meter = Meter([Recorder(raise_on="start"), second])
    with pytest.raises(CallbackError, match="on_start"):
        meter.start(RolloutConfig())
    assert second.methods == ["start"]


def test_who_was_not_started_is_not_ended() -> None:
    recorder = Recorder()
    Meter([recorder]).end(completed=False)
    assert recorder.calls == []


@pytest.mark.slow
def test_a_rollout_tells_its_callbacks_in_the_collectors_thread(tmp_path: Path) -> None:
    recorder, path = Recorder(), tmp_path / "metrics.jsonl"
    with Rollout(tiny_config(), callbacks=[recorder, MetricsFile(path)]) as rollout:
        trajectories = list(rollout.run([Task("frozen_lake", seed=s) for s in range(2)]))
        assert dict(rollout.running) == {"frozen_lake": 0}
    assert recorder.methods[0] == "start"
    assert recorder.methods.count("trajectory") == 2
    assert recorder.methods[-2:] == ["metrics", "end"]
    assert recorder.threads == {"interlace collector"}
    summary = recorder.calls[-1][1]
    assert summary["completed"] is True
    assert summary["trajectories"] == 2
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["trajectory", "trajectory", "metrics", "end"]
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    assert lines[-1]["sampled_tokens"] == lines[-2]["sampled_tokens"] == sampled
    assert {line["trajectory_id"] for line in lines[:2]} == {0, 1}


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run_with_one_error_and_the_others_are_closed() -> None:
    other = Recorder()
    config = tiny_config()
    with (
        pytest.raises(CallbackError, match=r"Recorder\.on_trajectory raised KeyError"),
        Rollout(config, callbacks=[Recorder(raise_on="trajectory"), other]) as rollout,
    ):
        list(rollout.run([Task("frozen_lake", seed=s) for s in range(2)]))
    assert other.methods[-1] == "end"
    assert other.calls[-1][1]["completed"] is False


def test_tensorboard_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'interlace\[tensorboard\]'"):
        TensorBoard(tmp_path)


@pytest.mark.slow
def test_tensorboard_has_a_curve_for_each_number_of_each_environment(tmp_path: Path) -> None:
    with Rollout(tiny_config(), callbacks=[TensorBoard(tmp_path)]) as rollout:
        returns = [t.return_ for t in rollout.run([Task("frozen_lake", seed=s) for s in range(2)])]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    drawn = events.Scalars("return/frozen_lake")
    assert [(point.step, point.value) for point in drawn] == list(enumerate(returns, start=1))
    assert {"success/frozen_lake", "turns/frozen_lake", "rollout/tokens_per_s"} <= set(
        events.Tags()["scalars"]
    )
