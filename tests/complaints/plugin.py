"""pytest, with a fix disabled: ``-p tests.complaints.plugin --ended FOLDER --disabled NAME``.

Writes into the folder how each phase of each test ends, as it ends.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.complaints.mutation import Reached, disable
from tests.complaints.mutations import MUTATIONS

from interlace.rollout.verify.complaints.ended import ENDS, REACHED


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("complaints")
    group.addoption("--ended", metavar="FOLDER", help="where to write how tests end")
    group.addoption("--disabled", metavar="NAME", help="the fix to disable")


def pytest_configure(config: pytest.Config) -> None:
    folder, name = config.getoption("--ended"), config.getoption("--disabled")
    if folder is not None:
        config.pluginmanager.register(Ends(Path(folder)))
    if name is None:
        return
    if folder is None:
        raise pytest.UsageError("--disabled needs --ended")
    if name not in MUTATIONS:
        raise pytest.UsageError(f"no mutation {name!r}: there are {', '.join(MUTATIONS)}")
    disable(MUTATIONS[name], Reached(Path(folder) / REACHED))


class Ends:
    """A line for each phase of each test."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ENDS

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        end = {
            "test": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "words": "" if report.passed else _words(report),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(end) + "\n")


def _words(report: pytest.TestReport) -> str:
    """The first line of what was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
