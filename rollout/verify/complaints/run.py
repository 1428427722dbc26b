"""Runs the tests of the table: all with their fixes in one process, then each without its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .complaint import Proof
from .ended import LOG, Ended, Seen, ended, read_ends

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "tests.complaints.plugin"
_HANGS_S, _FAILS_S = 20.0, 60.0
"""When a test without its fix is ended, from when its function is called: the one is to hang, the
other to end by itself."""
_SLACK_S = 120.0
"""For pytest to import everything and to prepare a test, and again to clean up after it, on a busy
machine."""
_ALL_S = 900.0
_LOOK_S = 0.1
_AT_A_TIME = 2
"""Tests without their fix; those with it run alone, as in the suite."""

Told = Callable[[str], None]


def see_all(proofs: Sequence[tuple[int, Proof]], tell: Told) -> Iterator[Seen]:
    """Both runs of each, in order; `tell` hears of every test as it ends.

    RuntimeError without the tests, as where the package was installed from a wheel.
    """
    if not (ROOT / "tests" / "complaints").is_dir():
        raise RuntimeError(f"{ROOT} has no tests/complaints: this needs a checkout of the source")
    tests = list(dict.fromkeys(proof.test for _, proof in proofs))
    with tempfile.TemporaryDirectory(prefix="interlace-complaints-") as folder:
        fixed = _with_fixes(tests, Path(folder), tell)
    over = threading.Event()

    def disabled(proof: Proof) -> Ended:
        with tempfile.TemporaryDirectory(prefix="interlace-complaints-") as folder:
            return _without(proof, Path(folder), over)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        try:
            each = pool.map(disabled, [proof for _, proof in proofs])
            for (row, proof), without in zip(proofs, each, strict=True):
                tell(f"row {row}, where {proof.disabled}: {without.outcome}: {without.words}")
                yield Seen(row=row, proof=proof, fixed=fixed[proof.test], disabled=without)
        finally:
            over.set()  # whoever looks no further does not wait for the rest
            pool.shutdown(cancel_futures=True)


def _with_fixes(tests: Sequence[str], folder: Path, tell: Told) -> dict[str, Ended]:
    told = 0

    def look() -> None:
        nonlocal told
        calls = [end for end in read_ends(folder) if end["phase"] == "call"]
        for number, end in enumerate(calls[told:], start=told + 1):
            tell(f"with its fix, {number}: {end['test']}: {end['outcome']}")
        told = len(calls)

    _pytest(tests, folder, lambda seconds: seconds > _ALL_S, look, threading.Event())
    return {test: ended(folder, test) for test in tests}


def _without(proof: Proof, folder: Path, over: threading.Event) -> Ended:
    seconds = _HANGS_S if proof.hangs else _FAILS_S
    words = [f"--disabled={proof.disabled}", f"--timeout={seconds:g}", "-x", proof.test]
    prepared_at: float | None = None

    def too_long(now: float) -> bool:
        nonlocal prepared_at
        if prepared_at is None and read_ends(folder):  # the first phase of a test prepares it
            prepared_at = now
        return now > (_SLACK_S if prepared_at is None else prepared_at + seconds + _SLACK_S)

    _pytest(words, folder, too_long, lambda: None, over)
    return ended(folder, proof.test)


def _pytest(
    words: Sequence[str],
    folder: Path,
    too_long: Callable[[float], bool],
    look: Callable[[], None],
    over: threading.Event,
) -> None:
    """Run pytest with the plugin, to its end or until so many seconds are `too_long`, or it is
    `over`. Only the function of a test counts for its timeout, not what prepares it."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider"),
        *("--timeout-method=signal", "-o", "timeout_func_only=true"),
        *(f"--ended={folder}", *words),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables = kept | {"PYTHONPATH": str(ROOT / ".src"), "OMP_NUM_THREADS": "1"}
    began_at = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while _runs(process) and not over.is_set():
                look()
                if too_long(time.monotonic() - began_at):
                    break
            look()
        finally:
            # Also what a test without its fix may have left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return True
    return False
