"""A short run of experiments/updates.py, with all its crashes and checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_thirty_updates_under_load_hold(tmp_path: Path) -> None:
    command = [sys.executable, "experiments/updates.py", "--count", "30", "--kind", "local"]
    run = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["wrong"] == []
    assert len(report["updates"]) == 30
    assert report["figures"]["ended in the middle"] == "2 trainer, 2 thread, 2 dictionary"
