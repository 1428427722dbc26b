"""The inside of another engine's process: opens it, and plays phases when it is told to.

Runs in that engine's environment, so the standard library is all there is. Speaks in lines: says
``ready`` before each phase and waits for a line, says ``done`` behind it, and ``end`` when what was
said is in `SAID` of its folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from interlace.envs.lifeline import die_with_parent

from .scripts import Engine, Script, play

JOB, SAID = "job.json", "said.json"

Open = Callable[[Mapping[str, Any]], Awaitable[Engine]]
"""Makes the engine from the job: its checkpoint, max_context, num_scripts and settings."""


def serve(open_engine: Open) -> None:
    """The main function of an engine's script, given a folder and the process to die with.

    Never returns: threads that an engine leaves behind do not hold the process.
    """
    channel = _take_stdout()
    die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    said = asyncio.run(_serve(open_engine, job, channel))
    partial = folder / f"{SAID}.partial"
    partial.write_text(json.dumps(said) + "\n", encoding="utf-8")
    os.replace(partial, folder / SAID)
    _say(channel, "end")
    os._exit(0)


async def _serve(open_engine: Open, job: Mapping[str, Any], channel: TextIO) -> list[Any]:
    engine = await open_engine(job)
    said: list[Any] = []
    for phase in job["phases"]:
        scripts = [Script.from_json(one) for one in phase]
        _say(channel, "ready")
        sys.stdin.readline()
        turns = await play(engine, scripts)
        _say(channel, "done")
        said.append([[asdict(one) for one in script] for script in turns])
    engine.close()
    return said


def _take_stdout() -> TextIO:
    """What engines print goes to the log; the real stdout is for our lines alone."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def _say(channel: TextIO, word: str) -> None:
    channel.write(f"{word}\n")
    channel.flush()
