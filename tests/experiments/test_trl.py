"""TRL's trainer, as it is, on episodes played here; and the page that shows how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "trl_frozenlake.py"


def test_the_page_shows_the_whole_script() -> None:
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```\n" in page


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)  # ten seconds of a quiet core, half of them imports
def test_grpo_trainer_trains_and_its_weights_reach_the_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--steps", "2", "--episodes", "8", "--kind", "local"],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps, each with other weights: True; gap within 1e-05: True" in done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["version"] for row in rows] == [0, 1]
    assert rows[0]["weights"] != rows[1]["weights"]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["gap_max"] <= 1e-4 for row in rows)
