"""CPU time of our own processes and of others, on a /proc that is written by hand."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from interlace.rollout.peers.process_tree import OthersWatch, ticks_between, tree_cpu_s

TICK = 1 / os.sysconf("SC_CLK_TCK")


def write(proc: Path, pid: int, parent: int, *, own: int, ended: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    before = "0 0 0 0 0 0 0 0 0"
    put(folder / "stat", f"{pid} (a) b) S {parent} {before} {own - 1} 1 {ended} 0 20 0 1 0 99\n")


def put(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    whole = path.with_name("whole")
    whole.write_text(text)
    os.replace(whole, path)


def test_a_tree_is_all_that_descends_and_what_has_ended(tmp_path):
    write(tmp_path, 10, 1, own=100, ended=7)
    write(tmp_path, 11, 10, own=20)
    write(tmp_path, 12, 11, own=3)
    write(tmp_path, 20, 1, own=5000)
    (tmp_path / "uptime").write_text("5")
    assert tree_cpu_s(10, tmp_path) == pytest.approx(130 * TICK)
    assert tree_cpu_s(20, tmp_path) == pytest.approx(5000 * TICK)
    assert tree_cpu_s(30, tmp_path) == 0


def test_what_ended_is_not_subtracted_and_what_is_new_began_at_nothing():
    assert ticks_between({1: 50, 2: 10}, {1: 60, 3: 4}) == 14


def test_our_own_work_is_not_that_of_others_and_stolen_time_is(tmp_path):
    def stat(stolen: int) -> None:
        put(tmp_path / "stat", f"cpu 1 2 3 4 5 6 7 {stolen} 0 0\ncpu0 1\n")

    write(tmp_path, os.getpid(), 1, own=100)
    write(tmp_path, 8_000_001, os.getpid(), own=100)
    write(tmp_path, 8_000_002, 1, own=100)
    stat(10)
    with OthersWatch(window_s=0.05, period_s=0.02, proc=tmp_path) as watch:
        assert watch.others == 0
        watch.begin()
        write(tmp_path, 8_000_001, os.getpid(), own=900_000)
        assert_holds_for(0.1, lambda: watch.peak() == 0)
        write(tmp_path, 8_000_001, 1, own=900_000)  # orphaned
        assert_holds_for(0.1, lambda: watch.peak() == 0)
        write(tmp_path, 8_000_002, 1, own=200)
        wait_until(lambda: watch.peak() > 0)
        wait_until(lambda: watch.others == 0)
        watch.begin()
        assert watch.peak() == 0
        stat(60)
        wait_until(lambda: watch.peak() > 0)


def assert_holds_for(seconds: float, holds) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < deadline:
        assert holds()
        tick.wait(0.01)


def wait_until(holds) -> None:
    deadline, tick = time.monotonic() + 10, threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        tick.wait(0.01)
