"""Injects order swaps below the sequencer into four real ranks, and sees who names them.

    python -m interlace.rollout.verify.swaps --count 1000

The ranks are forked once; every injection gets new communicators, of the next epoch. Ends with 0
only if every swap was named on every rank within its step, and every control went as it should.
"""

from __future__ import annotations

import argparse
import sys

from .report import table, wrongs
from .run import run

_SHARES = {"order, gloo": 0.1, "order, window and serial device": 0.1, "mixed up, gloo": 0.1}
"""Of the number of swaps."""
_MOST_OVER_GLOO = 40
"""Threads of groups with collectives in flight stay until their deadline."""
_CONTROLS = {
    "no witness, window": 4,
    "no witness, gloo": 2,
    "no witness, serial device": 1,
    "no witness, mixed up, window": 4,
    "in the sequencer, gloo": 2,
    "in the sequencer, serial device": 1,
    "in the sequencer, hashes per communicator, gloo": 2,
    "in the sequencer, hashes per communicator, window": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="order swaps (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="what is injected where")
    parser.add_argument("--controls", type=int, default=1, help="so many times each control")
    options = parser.parse_args()
    counts = {name: max(1, round(share * options.count)) for name, share in _SHARES.items()}
    for name in ("order, gloo", "mixed up, gloo"):
        counts[name] = min(counts[name], _MOST_OVER_GLOO)
    swaps = options.count - counts["order, gloo"] - counts["order, window and serial device"]
    counts = {"order, window": swaps, "mixed up, window": max(2, options.count // 5), **counts}
    counts |= {name: times * options.controls for name, times in _CONTROLS.items()}
    runs = run(counts, seed=options.seed)
    print(table(runs))
    found = wrongs(runs)
    for line in found[:20]:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
