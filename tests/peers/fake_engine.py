"""An engine that says the length of its context again and again; what a peer's script looks like.

`settings` of its job can make it fail: {"fails": "open" | "turn" | "length" | "silent"},
and with `points_above` that it says more of it.
"""

import asyncio
import os
import sys

from interlace.rollout.peers.scripts import Said, now
from interlace.rollout.peers.serving import serve


class Fake:
    def __init__(self, fails: str | None) -> None:
        self.fails, self.asked, self.closed = fails, [], False

    async def turn(self, name, context, num, *, last):
        self.asked.append((name, list(context), num, last))
        if self.fails == "turn":
            raise ValueError("no turn today")
        if self.fails == "silent":
            await asyncio.sleep(60)
        tokens, times = [], []
        for _ in range(num - (self.fails == "length")):
            await asyncio.sleep(0.0005)
            tokens.append(len(context))
            times.append(now())
        return Said(tokens=tokens, times=times)

    def close(self) -> None:
        self.closed = True


async def open_fake(job):
    print("an engine is chatty")
    fails = job["settings"].get("fails")
    if fails == "open":
        print("RuntimeError: no such CPU", file=sys.stderr)
        print("and more words", file=sys.stderr)
        if job["settings"].get("points_above"):
            print("RuntimeError: it failed. See root cause above.", file=sys.stderr)
        os._exit(3)
    return Fake(fails)


if __name__ == "__main__":
    serve(open_fake)
