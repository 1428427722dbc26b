"""Runs the cases that need real ranks: one server that imports torch once, forks for every case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from .hazard import Case, Outcome, Processes, RankEnd

_SERVER = "interlace.rollout.verify.hazards.fork_server"


class Forks:
    """Sees cases through. The server starts with the first case that needs it, ends with `with`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def see(self, case: Case) -> Outcome:
        """How the case ends, whichever kind it is of."""
        if isinstance(case, Processes):
            return case.judge(self.run(case))
        return case()

    def run(self, case: Processes) -> list[RankEnd]:
        """How every rank of a case of processes ended. RuntimeError if the server is gone."""
        if self._server is None:
            self._server = _start()
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory(prefix="interlace-hazard-") as folder:
            order: dict[str, Any] = {
                "module": case.program.__module__,
                "program": case.program.__name__,
                "ranks": case.ranks,
                "deadline_s": case.deadline_s,
                "folder": folder,
            }
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with status {server.wait()}")
        return [RankEnd(**end) for end in json.loads(answer)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server."""
        if self._server is not None:
            self._server.communicate()  # the end of its input is the end of the server
            self._server = None


def _start() -> subprocess.Popen[str]:
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", _SERVER],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
