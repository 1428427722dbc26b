from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python_examples() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)


def test_the_example_is_short() -> None:
    (example,) = python_examples()
    assert len(example.splitlines()) <= 20


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    (example,) = python_examples()
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stderr
    *trajectories, last = done.stdout.splitlines()
    assert sorted(line.split()[0] for line in trajectories) == [
        f"frozen_lake-{i}" for i in range(4)
    ]
    assert last == "every rank's kernels passed the exactness self-test: True"


def test_linked_files_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
