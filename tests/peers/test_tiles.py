"""Nobody gets matrix tiles below a command that forbids them, whatever the processor has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.rollout.peers import child
from interlace.rollout.peers.request import PeersRequest
from interlace.rollout.peers.tiles import without_tiles

pytestmark = pytest.mark.processes
SOURCES = Path(__file__).parents[2] / ".src"
ASK = "from interlace.rollout.peers.tiles import may_use_tiles; print(may_use_tiles())"
KERNELS = "from interlace.moe import kernels; print(kernels.has_tiles())"


def printed(*command: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_command_without_tiles_is_refused_them():
    assert printed(*without_tiles([sys.executable, "-c", ASK])) == "False"


def test_so_is_what_it_starts():
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}])"
    assert printed(*without_tiles([sys.executable, "-c", start])) == "False"


def test_who_has_them_cannot_forbid_them():
    if printed(sys.executable, "-c", ASK) != "True":
        pytest.skip("this processor has no tiles")
    late = (
        "from interlace.rollout.peers.tiles import forbid_tiles, may_use_tiles\n"
        "may_use_tiles()\n"
        "try:\n    forbid_tiles()\nexcept RuntimeError as error:\n    print(error)"
    )
    assert "may use matrix tiles already" in printed(sys.executable, "-c", late)


@pytest.mark.slow
def test_our_kernels_do_without():
    assert printed(*without_tiles([sys.executable, "-c", KERNELS])) == "False"


def test_a_run_that_should_be_without_and_is_not_says_so(tmp_path, monkeypatch):
    request = PeersRequest(installed=tmp_path, tiles=False)
    asked = {"request": request.as_json(), "arm": "llama-cpp", "overrides": []}
    (tmp_path / "request.json").write_text(json.dumps(asked))
    monkeypatch.setattr(child, "may_use_tiles", lambda: True)
    with pytest.raises(RuntimeError, match="nobody has forbidden them"):
        child.run(tmp_path)
