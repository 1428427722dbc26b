"""The script for one GPU does all it can on a CPU, and no part of it stops the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from interlace.experiments import device_check

PARTS = ["facts", "model", "communicators", "streams", "exact", "side_by_side", "completion"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_dry_run_does_every_part_and_all_modes_give_one_digest(tmp_path: Path) -> None:
    command = [sys.executable, device_check.__file__, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "device.json").read_text())
    assert report["ok"]
    assert report["dry_run"]
    assert list(report["parts"]) == PARTS
    found = {name: part["found"] for name, part in report["parts"].items()}
    assert found["communicators"]["collectives"] > 100
    assert found["completion"]["one_digest"]
    assert found["completion"]["ratio"]["serial"]["median"] > 0
    assert found["exact"]["largest_error"] < 1e-4
    assert found["side_by_side"]["ms_a_step"]["both"] > 0
    assert "one digest" in done.stdout
    assert not list(tmp_path.glob("model-*")), "the model is not left behind"


def raises(setting: Any, deadline: float) -> Any:
    raise RuntimeError("no kernel image\nis available")


def ends(setting: Any, deadline: float) -> Any:
    os._exit(3)


def hangs(setting: Any, deadline: float) -> Any:
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "said"),
    [
        (raises, "RuntimeError: no kernel image"),
        (ends, "its process ended with exit code 3; see part.log"),
        (hangs, "not done within 2 s"),
    ],
)
def test_a_part_that_fails_ends_or_hangs_is_reported(part: Any, said: str, tmp_path: Path) -> None:
    setting = device_check.dry(tmp_path)
    answer = device_check.guarded(part, setting, 2.1, tmp_path / "part.log")
    assert (answer["ok"], answer["error"]) == (False, said)
    assert answer["seconds"] < 20


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    answer = device_check.guarded(ends, device_check.dry(tmp_path), 0.5, tmp_path / "part.log")
    assert answer["error"] == "no time was left for it"
