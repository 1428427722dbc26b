"""The process in which an agent's Python runs: one piece of code at a time, names persist.

    python -m interlace.envs.python_child FD PARENT MEMORY_BYTES SEED

It says READY over the socket FD. Then a frame with code arrives there, and one byte, RAN, RAISED or
NO_CODE, goes back. What the code prints goes to standard output, which the parent reads. It ends
when the other end of FD closes or PARENT ends.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import random
import resource
import signal
import sys
import traceback
from typing import Any

from interlace.envs.frames import read_frame
from interlace.envs.lifeline import die_with_parent

READY, RAN, RAISED, NO_CODE = b"r", b"0", b"1", b"2"

_NAME = "<code>"
_MAX_FILE_BYTES = 64 * 1024**2
_MAX_OPEN_FILES = 128


def main(argv: list[str]) -> int:
    """Set the limits, then run what arrives."""
    fd, parent, memory_bytes, seed = map(int, argv)
    die_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(fd, False)
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        _limit(which, value)
    random.seed(seed)
    owner = os.getpid()
    names: dict[str, Any] = {"__name__": "__main__"}
    os.write(fd, READY)
    while (code := read_frame(fd)) is not None:
        outcome = _run(code.decode("utf-8"), names)
        if os.getpid() != owner:
            os._exit(0)  # the code forked and its child returned here: it has no voice
        os.write(fd, outcome)
    os._exit(0)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _run(code: str, names: dict[str, Any]) -> bytes:
    """Run all of it, and print the value of a last expression as an interpreter does."""
    # One stream for both, so that their order is kept; anew, as the code may have closed the last.
    with contextlib.suppress(OSError):
        sys.stdout = sys.stderr = io.TextIOWrapper(
            os.fdopen(os.dup(1), "wb", buffering=0),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
    try:
        tree = ast.parse(code, _NAME)
        if not tree.body:
            return NO_CODE
        last = tree.body[-1]
        tail = None
        if isinstance(last, ast.Expr):
            tail = compile(ast.Expression(last.value), _NAME, "eval")
            tree.body.pop()
        body = compile(tree, _NAME, "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        _print_error(error, None)
        return NO_CODE
    # So that tracebacks show the lines.
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    try:
        exec(body, names)
        value = eval(tail, names) if tail else None
        if value is not None:
            print(repr(value))
    except BaseException as error:  # whatever it was, the next piece of code may do better
        own = error.__traceback__.tb_next if error.__traceback__ else None
        _print_error(error, own)
        return RAISED
    return RAN


def _print_error(error: BaseException, trace: Any) -> None:
    with contextlib.suppress(BaseException):  # the code may have replaced everything we use
        traceback.print_exception(type(error), error, trace, chain=False, limit=8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
