"""`interlace rollout` as one rank of torchrun, one of whose ranks fails once all are at work.

Arguments: what goes wrong, on which rank, a folder for notes, the command line. Each rank notes
its process id and when it said its last word; the one that fails notes when that was. What is
done from outside (stop, kill) is done by the test once that note is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlace.comm.crossing import Crossing
from interlace.comm.plan import StepPlan
from interlace.rollout.cli import main
from interlace.rollout.engine import Engine
from interlace.rollout.launch import rank as launch_rank
from interlace.rollout.launch import torchrun
from interlace.rollout.messages import Event, RankFailure

FIRST_PASSES = 120
"""Tickets by which every path has run and the short deadlines hold."""


def spin() -> None:
    while True:
        pass


def other_op(engine: Engine) -> None:
    """The next ticket of this rank is another one than that of the others."""
    sequencer: Any = engine._sequencer
    walk = sequencer.walk

    async def other(plan: StepPlan, started: Any) -> Any:
        first, *rest = plan.tickets or (None,)
        if first is not None:
            changed = replace(first, op=replace(first.op, stage="elsewhere"))
            plan = replace(plan, tickets=(changed, *rest))
        return await walk(plan, started)

    sequencer.walk = other


def end_in_a_crossing(number: int, *, abreast: int = 0) -> None:
    """By this signal, where a pass that goes straight, or `abreast` of them, wait for a message;
    one of the first layer, so that others are still to be sent."""
    poll = Crossing.poll

    def ends(self: Crossing, handle: None) -> bool:
        if len(self.abreast) >= abreast and self.at < 3:
            os.kill(os.getpid(), number)
        return poll(self, handle)

    Crossing.poll = ends  # type: ignore[method-assign]


def fail(engine: Engine, fault: str) -> None:
    match fault:
        case "sleep":
            time.sleep(600)
        case "loop":
            spin()
        case "gil":
            ctypes.PyDLL(None).sleep(600)
        case "raise":
            raise ValueError("a shape that does not fit")
        case "other":
            other_op(engine)
        case "crossing-stop":
            end_in_a_crossing(signal.SIGSTOP)
        case "crossing-kill":
            end_in_a_crossing(signal.SIGKILL)
        case "abreast-stop":
            end_in_a_crossing(signal.SIGSTOP, abreast=2)
        case "abreast-kill":
            end_in_a_crossing(signal.SIGKILL, abreast=2)


def run() -> None:
    fault, failing, notes, *arguments = sys.argv[1:]
    rank, folder = os.environ["RANK"], Path(notes)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    step, run_process = Engine.step, torchrun.run_process
    begun = False

    async def failing_step(self: Engine) -> bool:
        nonlocal begun
        if rank == failing and not begun and len(self.journal.tickets) > FIRST_PASSES:
            begun = True
            (folder / "fault.partial").write_text(str(time.monotonic()))
            (folder / "fault.partial").rename(folder / "fault")
            fail(self, fault)
        return await step(self)

    def noting(*parts: Any, **options: Any) -> None:
        emit: Callable[[Event], None] = parts[4]

        def note(event: Event) -> None:
            if isinstance(event, RankFailure):
                said = {"at": time.monotonic(), "text": event.text}
                (folder / f"said-{rank}").write_text(json.dumps(said))
            emit(event)

        run_process(*parts[:4], note, *parts[5:], **options)

    if fault == "loading" and rank == failing:
        launch_rank.compose = lambda *parts, **options: time.sleep(600)
    Engine.step = failing_step  # type: ignore[method-assign]
    torchrun.run_process = noting
    sys.argv = ["interlace", *arguments]
    main()


if __name__ == "__main__":
    run()
