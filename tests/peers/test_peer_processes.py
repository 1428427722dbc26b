"""Engines in processes of their own: led through phases together, and what their ends look like."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from tests.peers.made import phase, script

from interlace.rollout.peers.peer_processes import LOG, Launch, PeerError, play_peer

pytestmark = pytest.mark.processes
ENGINE = Path(__file__).with_name("fake_engine.py")
SOURCES = Path(__file__).parents[2] / ".src"
LAUNCH = Launch(command=(sys.executable, str(ENGINE)), environ={"PYTHONPATH": str(SOURCES)})
PHASES = [
    phase("warm-up", [script("warm")]),
    phase("rollout", [script(f"r-{n}", num_turns=2, num_generated=n + 2) for n in range(3)]),
]


def played(folder, num=1, *, patience_s=30.0, **settings):
    told = list[str]()
    job = {"settings": settings}
    found = play_peer([LAUNCH] * num, PHASES, job, folder, told.append, patience_s=patience_s)
    return found, told


@pytest.mark.parametrize("num", [1, 2, 5])
def test_scripts_come_back_in_order_however_many_processes_share_them(tmp_path, num):
    found, told = played(tmp_path, num)
    assert [one.name for one in found] == ["warm-up", "rollout"]
    assert [[len(turn.tokens) for turn in turns] for turns in found[1].said] == [
        [2, 2],
        [3, 3],
        [4, 4],
    ]
    assert told == ["starting warm-up", "warm-up", "starting rollout", "rollout"]
    for one in found:
        times = [at for turns in one.said for turn in turns for at in turn.times]
        assert one.began_at < min(times) <= max(times) < one.ended_at
        assert 0 <= one.cpu_s < 5
    assert "an engine is chatty" in (tmp_path / "engine-0" / LOG).read_text()


def test_an_engine_that_does_not_open_tells_why(tmp_path):
    with pytest.raises(PeerError, match="ended with code 3: RuntimeError: no such CPU"):
        played(tmp_path, fails="open")


def test_a_line_that_points_to_the_reason_is_not_taken_for_it(tmp_path):
    with pytest.raises(PeerError, match="ended with code 3: RuntimeError: no such CPU"):
        played(tmp_path, fails="open", points_above=True)


def test_an_engine_that_fails_in_a_turn_tells_why(tmp_path):
    with pytest.raises(PeerError, match="ended with code 1: ValueError: no turn today"):
        played(tmp_path, 2, fails="turn")


def test_an_engine_that_is_silent_is_ended(tmp_path):
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"said nothing for 1 s, expected 'done'.*chatty"):
        played(tmp_path, patience_s=1.0, fails="silent")
    assert time.monotonic() - began < 20
    assert not [line for line in children() if ENGINE.name in line]


def children() -> list[str]:
    """The commands of processes whose parent is this one."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if folder.name.isdigit() and int(fields[1]) == os.getpid():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found
