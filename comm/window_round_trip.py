"""Two processes exchange numbers over a window: `interlace doctor`, and a first look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from .collectives import Gather
from .window_channel import ByteCommunicator, WindowChannel
from .windows import Tell, Windows, meet, native

_ROUNDS = 1000
_CAPACITY = 4096


def round_trip(timeout_s: float) -> float:
    """Mean seconds of a gather between this process and one that it starts.

    Raises Unshared or a CommunicationError where it does not work, RuntimeError where the other
    process says nothing.
    """
    command = [sys.executable, "-m", "interlace.comm.window_round_trip"]
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        into, out = other.stdin, other.stdout

        def tell(text: str) -> list[str]:
            answer = out.readline()
            if not answer:
                raise RuntimeError("the other process ended without a word")
            both = [text, json.loads(answer)]
            into.write(json.dumps(both) + "\n")
            into.flush()
            return both

        try:
            return _gathers(0, tell, timeout_s)
        finally:
            other.kill()


def _gathers(rank: int, tell: Tell, timeout_s: float) -> float:
    extension = native()
    met = meet(rank, tell, extension=extension is not None)
    windows = Windows(rank, tell, met, extension)
    window = windows.make("p", "r", [(0, 1)], slots=2, capacity=_CAPACITY)
    channel = WindowChannel(
        window,
        path="p",
        role="r",
        members=(0, 1),
        rank=rank,
        slots=2,
        capacity=_CAPACITY,
        timeout_s=timeout_s,
        waiter=windows.waiter,
        clock=time.monotonic_ns,
    )
    communicator = ByteCommunicator(channel)
    began_at = time.monotonic()
    for number in range(_ROUNDS):
        payload = (2 * number + rank).to_bytes(8, "little")
        handle = communicator.post(Gather(role="r", stage="x", payload=payload), None)
        received = [int.from_bytes(one, "little") for one in communicator.result(handle)]
        if received != [2 * number, 2 * number + 1]:
            raise RuntimeError(f"round {number}: got {received}")
    seconds = time.monotonic() - began_at
    tell("done")
    windows.close()
    return seconds / _ROUNDS


def _other() -> None:
    def tell(text: str) -> list[str]:
        print(json.dumps(text), flush=True)
        both: list[str] = json.loads(sys.stdin.readline())
        return both

    _gathers(1, tell, 30.0)


if __name__ == "__main__":
    _other()
